"""Each file of an encodings folder defines one encoding. Only the files listed below may name encodings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.documents import ROOT
from support.encodings import HalvedEncoding

from penstock.errors import ConfigError
from penstock.kernels import ENCODINGS, LinearEncoding, encoding_named
from penstock.kernels.encodings import EncodingRegistry
from penstock.kernels.reference import ReferenceOps

ENCODING_FILE = """
from support.encodings import HalvedEncoding

ENCODING = HalvedEncoding({name!r})
"""


def test_each_file_without_a_leading_underscore_adds_an_encoding(tmp_path: Path) -> None:
    (tmp_path / "third.py").write_text(ENCODING_FILE.format(name="third"))
    (tmp_path / "_shared.py").write_text("raise RuntimeError('must not be imported')")
    registry = EncodingRegistry([tmp_path])
    assert set(registry) == {*ENCODINGS, "third"}
    assert "third" in registry.names
    assert registry["third"].name == "third"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold ENCODING, a LinearEncoding"),
        (ENCODING_FILE.format(name="x"), r"'x': its file must be x\.py"),
    ],
)
def test_a_file_without_a_record_of_its_name_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(EncodingRegistry([tmp_path]))


def test_an_added_encoding_exists_only_within_the_with_block() -> None:
    with ENCODINGS.extended(HalvedEncoding()):
        assert "halved" in ENCODINGS
        weight, x = torch.randn(5, 7), torch.randn(3, 7)
        packed_weight = ReferenceOps().pack_linear(weight, "halved")
        torch.testing.assert_close(ReferenceOps().linear(x, packed_weight), x @ weight.T)
    assert "halved" not in ENCODINGS
    with pytest.raises(ConfigError, match="unknown encoding 'halved': use one of float32, bfloat16, float16"):
        encoding_named("halved")


def test_importing_the_records_does_not_import_torch() -> None:
    code = (
        "import sys; from penstock.kernels import ENCODINGS; "
        "assert list(ENCODINGS); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
class TestEveryEncoding:
    def test_packed_tensors_have_the_declared_types_and_shapes(self, encoding: LinearEncoding) -> None:
        weight = torch.randn(70, 100)
        tensors = encoding.pack(weight)
        assert tensors["weight"].dtype == encoding.storage_dtype.to_torch()
        assert tensors["weight"].shape == weight.shape
        assert all(len(tensor) == len(weight) for tensor in tensors.values()), (
            "each tensor has one row per output"
        )
        assert encoding.is_float == ("scales" not in tensors)
        if not encoding.is_float:
            is_signed = tensors["weight"].dtype == torch.int8
            assert int(tensors["weight"].int().abs().max()) <= (1 << encoding.bits) // (2 if is_signed else 1)
            num_groups = 1 if encoding.group_size is None else -(-100 // encoding.group_size)
            assert tensors["scales"].numel() == 70 * num_groups

    def test_zero_weights_unpack_to_zero(self, encoding: LinearEncoding) -> None:
        packed_zeros = encoding.pack(torch.zeros(3, 40))
        assert bool(packed_zeros["weight"].any()) == encoding.has_zero_points
        assert not encoding.unpack(packed_zeros).any()

    def test_unpacked_weights_are_close_to_the_original(self, encoding: LinearEncoding) -> None:
        weight, x = torch.randn(70, 96), torch.randn(3, 96).to(encoding.compute_dtype.to_torch())
        tensors = encoding.pack(weight)
        error = (encoding.unpack(tensors).float() - weight).abs().max() / weight.abs().max()
        # Bits of mantissa and sign: 4 in 8-bit floats, 2 in 4-bit floats. The distances between values of nf4
        # are similar to those of 4-bit floats.
        effective_bits = {"fp8": 4, "mxfp4": 2, "nvfp4": 2, "nf4": 2, "fp4": 2}.get(
            encoding.name, min(encoding.bits - 1, 7)
        )
        assert float(error) <= 1.1 * 2.0**-effective_bits
        y = encoding.multiply(x, tensors, None)
        assert y.dtype == x.dtype
        expected = x.float() @ encoding.unpack(tensors).float().T
        torch.testing.assert_close(y.float(), expected, atol=0.2, rtol=0.02)

    def test_encodings_chosen_for_layers_and_devices_exist(self, encoding: LinearEncoding) -> None:
        chosen_encodings = {encoding.on_device("cpu"), encoding.on_device("gpu")}
        for size in (8, 64, 1000, 5000):
            chosen_encodings |= {
                encoding.for_layer(role, size, size) for role in ("linear", "expert", "values", "head")
            }
        assert chosen_encodings <= set(ENCODINGS)

    def test_the_size_estimate_is_close_to_num_bytes(self, encoding: LinearEncoding) -> None:
        exact_bits = 8 * encoding.num_bytes(4096, 4096) / 4096**2
        assert exact_bits == pytest.approx(encoding.bits_per_weight, rel=0.12)


# -- Names -----------------------------------------------------------------------------------------------

MAY_NAME_ENCODINGS = (
    "kernels/encodings/",
    "weights/formats/",  # a format returns the encoding that it reads
    "kernels/cpu/packing.py",  # maps encodings to their codes in the C++ kernels
    "codecs/",  # a codec states the encodings of its layers
)
ELEMENT_TYPES = {"float32", "bfloat16", "float16", "fp8", "int8", "uint8"}
"""Names of encodings that are also element types. The files below may use them."""
NAMES_OF_ELEMENT_TYPES = (
    "architectures/cache_types.py",  # element types of the KV cache
    "dtype.py",
    "config/pipeline.py",  # element types of the KV cache
    "weights/gguf_config.py",  # element type of the activations
    "bench/random_weights.py",  # element type of the written checkpoint
    "media/audio_files.py",  # element types of samples
)


def test_only_the_listed_files_name_encodings() -> None:
    violations = []
    for file in sorted((ROOT / "penstock").rglob("*.py")):
        path = file.relative_to(ROOT / "penstock").as_posix()
        if path.startswith(MAY_NAME_ENCODINGS):
            continue
        allowed_names = ELEMENT_TYPES if path in NAMES_OF_ELEMENT_TYPES else set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in set(ENCODINGS) - allowed_names:
                violations.append(f"{path}:{node.lineno}: {node.value}")
    assert not violations, "\n".join(violations)

"""`StoredFormat`: reads the linear layers of a float checkpoint in any encoding, to measure encodings.

Some encodings, such as ``uint4``, exist only for checkpoint formats and cannot be chosen for a float
checkpoint. `StoredFormat` packs each layer of a float checkpoint when it reads the layer. Weights are rounded
to the nearest value, without calibration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import encoding_named
from penstock.weights.formats import (
    CheckpointFormat,
    Headers,
    TensorReader,
    quant_method,
    quantization_section,
)
from penstock.weights.safetensors import TensorHeader

_QUANT_METHOD = "stored"
_NOT_LINEAR = (".gate.weight", ".router.weight", "embeddings.weight", "norm.weight")


class StoredFormat(CheckpointFormat):
    """Reads float layers in the encoding of ``quantization_config``. Layers are packed when they are read.

    Matrices with one row per token of the vocabulary, routers, embeddings and norms stay floats.
    """

    name = _QUANT_METHOD
    quant_methods = (_QUANT_METHOD,)
    keeps_floats = True

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        encoding = str(quantization_section(config)["encoding"])
        text = config.get("text_config")
        vocab_size = (text if isinstance(text, Mapping) else config).get("vocab_size")

        def is_linear(name: str, header: TensorHeader) -> bool:
            is_matrix = name.endswith(".weight") and len(header.shape) == 2 and header.is_float
            return is_matrix and not name.endswith(_NOT_LINEAR) and header.shape[0] != vocab_size

        return {
            name: replace(header, encoding=encoding) if is_linear(name, header) else header
            for name, header in stored.items()
        }

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        weight = source.tensor(header)
        if header.encoding is None:
            return None, {"weight": weight}
        return header.encoding, encoding_named(header.encoding).pack(weight)


def write_stored(checkpoint: Path, folder: Path, encoding: str) -> Path:
    """Write a checkpoint that `StoredFormat` reads in an encoding.

    The files of the written checkpoint are links to the files of ``checkpoint``, except config.json.

    Args:
        checkpoint: a folder with safetensors files of floats.
        folder: a folder that does not exist yet.
        encoding: the name of any encoding.

    Raises:
        ConfigError: the encoding is unknown, or the checkpoint is quantized.
    """
    encoding_named(encoding)
    config = json.loads((checkpoint / "config.json").read_text())
    if quant_method(config) is not None:
        raise ConfigError("model_path", f"{checkpoint} is quantized: a checkpoint of floats is needed")
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config["quantization_config"] = {"quant_method": _QUANT_METHOD, "encoding": encoding}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

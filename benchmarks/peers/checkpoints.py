"""A checkpoint of random weights, and its conversion for each engine by the engine's own tools."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.peers import Peer, python_of
from penstock.bench.random_weights import shape_config, write_random_checkpoint
from penstock.errors import InputError

_POSITIONS = 8192
_DEFAULTS = {  # keys that peers require; Penstock has defaults for them
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # kinds of pieces in a SentencePiece model
_GGUF_OF_MAX = {"q4_0": "Q4_0", "q4_k": "Q4_K_M", "q6_k": "Q6_K"}
_QUANTIZE = """
import ctypes, sys, llama_cpp as api
params = api.llama_model_quantize_default_params()
params.ftype = getattr(api, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def checkpoint(shape: str, folder: Path) -> Path:
    """Return the folder of a checkpoint of random weights. Writes the checkpoint if it does not exist.

    Args:
        shape: a shape as in `shape_config`.
        folder: the parent folder of all checkpoints.

    Raises:
        InputError: the shape is unknown.
    """
    target = folder / Path(shape).name
    if not (target / "complete").exists():
        target.mkdir(parents=True, exist_ok=True)
        config = {**_DEFAULTS, **shape_config(shape), "max_position_embeddings": _POSITIONS}
        config.setdefault("architectures", [_ARCHITECTURES[config["model_type"]]])
        write_random_checkpoint(target, config)
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
        (target / "tokenizer_config.json").write_text(json.dumps(described))
        (target / "tokenizer.model").write_bytes(sentencepiece_model())
        (target / "complete").touch()
    return target


def vocabulary_of(folder: Path) -> int:
    """Return the vocabulary size of a checkpoint."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def sentencepiece_model() -> bytes:
    """Return the shortest tokenizer that llama.cpp's converter accepts. The converter pads the vocabulary."""
    pieces = [("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL), ("t", _NORMAL)]
    return b"".join(_piece(text.encode(), kind) for text, kind in pieces)


def _piece(text: bytes, kind: int) -> bytes:
    """Return a piece as a protocol buffer: field 1 of the model, with the fields text, score and kind."""
    body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", 0.0) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(body)]) + body


def converted(peer: Peer, encoding: str, source: Path, venvs: Path) -> Path:
    """Return the path that a peer loads for a checkpoint in an encoding. Converts the checkpoint if needed.

    Raises:
        CalledProcessError: a conversion tool failed. The tool printed the reason.
        InputError: the conversion needs the tools of a peer that is not installed.
    """
    if peer.name == "llama_cpp":
        return _gguf(encoding, source, venvs)
    if peer.name == "openvino":
        return _openvino(encoding, source, venvs / peer.name)
    if peer.name == "max" and encoding in _GGUF_OF_MAX:
        return _gguf(_GGUF_OF_MAX[encoding], source, venvs)
    return source


def pack(source: Path, encoding: str, environment: dict[str, str]) -> None:
    """Let Penstock write its packed weights of a checkpoint to the cache folder set in ``environment``.

    Raises:
        CalledProcessError: the command failed. It printed the reason.
    """
    command = [sys.executable, "-m", "penstock", "warm-cache", "--pack", "--model", str(source)]
    command += ["--quantization-encoding", encoding]
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True)


def _gguf(encoding: str, source: Path, venvs: Path) -> Path:
    python = python_of(venvs / "llama_cpp")
    plain, wanted = source / "bf16.gguf", source / f"{encoding}.gguf"
    if not wanted.exists() and not python.exists():
        raise InputError(
            f"llama.cpp's tools write {wanted}: run `python -m benchmarks.peers setup llama_cpp` first"
        )
    if not plain.exists():
        part = plain.with_suffix(".part")
        script = _converter(venvs / "llama_cpp.source")
        subprocess.run([python, script, source, "--outtype", "bf16", "--outfile", part], check=True)
        part.rename(plain)
    if not wanted.exists():
        part = wanted.with_suffix(".part")
        subprocess.run([python, "-c", _QUANTIZE, plain, part, encoding], check=True)
        part.rename(wanted)
    return wanted


def _converter(source: Path) -> Path:
    """Return llama.cpp's conversion script. Unpacks the source distribution if needed."""
    name = "*/vendor/llama.cpp/convert_hf_to_gguf.py"
    if not (found := sorted(source.glob(name))):
        (packed,) = source.glob("*.tar.gz")
        with tarfile.open(packed) as archive:
            archive.extractall(source, filter="data")
        found = sorted(source.glob(name))
    return found[0]


def _openvino(encoding: str, source: Path, venv: Path) -> Path:
    target = source / f"openvino-{encoding}"
    if not target.exists():
        part = source / f"openvino-{encoding}.part"
        grouped = ["--group-size", "128", "--ratio", "1.0"] if encoding == "int4" else []
        command: list[str | Path] = [venv / "bin" / "optimum-cli", "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", "--weight-format", encoding, *grouped, part]
        subprocess.run(command, check=True)
        part.rename(target)
    return target

"""Checkpoints with random weights, and their conversion to the formats of peers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.peers import Peer, interpreter_path
from penstock.bench.random_weights import shape_config, write_random_checkpoint
from penstock.errors import InputError

_MAX_POSITIONS = 8192
_REQUIRED_BY_PEERS = {  # keys of config.json that peers require and Penstock does not
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # values of SentencePiece's ModelProto.SentencePiece.Type
_GGUF_TYPES_OF_MAX = {"q4_0": "Q4_0", "q4_k": "Q4_K_M", "q6_k": "Q6_K"}
_QUANTIZE_GGUF = """
import ctypes, sys, llama_cpp as api
params = api.llama_model_quantize_default_params()
params.ftype = getattr(api, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def checkpoint(shape: str, folder: Path) -> Path:
    """Return the folder of a checkpoint of random weights. Writes the checkpoint if it is not complete.

    Args:
        shape: the name of a shape, or the path of a config.json, as in `shape_config`.
        folder: the folder that contains all checkpoints.

    Raises:
        InputError: the shape is unknown.
    """
    target = folder / Path(shape).name
    if not (target / "complete").exists():
        target.mkdir(parents=True, exist_ok=True)
        config = {**_REQUIRED_BY_PEERS, **shape_config(shape), "max_position_embeddings": _MAX_POSITIONS}
        config.setdefault("architectures", [_ARCHITECTURES[config["model_type"]]])
        write_random_checkpoint(target, config)
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
        (target / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        (target / "tokenizer.model").write_bytes(sentencepiece_model())
        (target / "complete").touch()
    return target


def read_vocab_size(folder: Path) -> int:
    """Return the vocabulary size of a checkpoint."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def sentencepiece_model() -> bytes:
    """Return a SentencePiece file with the smallest tokenizer that llama.cpp's converter accepts.

    The converter fills the vocabulary up to ``vocab_size``.
    """
    pieces = [("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL), ("t", _NORMAL)]
    return b"".join(_piece(text.encode(), kind) for text, kind in pieces)


def _piece(text: bytes, piece_type: int) -> bytes:
    """Return a vocabulary entry as field 1 of a protocol buffer, with the fields piece, score and type."""
    body = (
        b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", 0.0) + b"\x18" + bytes([piece_type])
    )
    return b"\x0a" + bytes([len(body)]) + body


def converted_model(peer: Peer, encoding: str, source: Path, venvs: Path) -> Path:
    """Return the path of a checkpoint in the format and encoding that the peer loads.

    Converts the checkpoint if the peer needs another format and the converted model does not exist.

    Raises:
        CalledProcessError: a conversion tool failed. The tool printed the reason.
        InputError: the conversion needs the tools of llama.cpp, which are not installed.
    """
    if peer.name == "llama_cpp":
        return _gguf(encoding, source, venvs)
    if peer.name == "openvino":
        return _openvino(encoding, source, venvs / peer.name)
    if peer.name == "max" and encoding in _GGUF_TYPES_OF_MAX:
        return _gguf(_GGUF_TYPES_OF_MAX[encoding], source, venvs)
    return source


def pack_weights(source: Path, encoding: str, environment: dict[str, str]) -> None:
    """Write Penstock's packed weights of a checkpoint to the cache folder that ``environment`` sets.

    Raises:
        CalledProcessError: ``penstock warm-cache`` failed. The command printed the reason.
    """
    command = [sys.executable, "-m", "penstock", "warm-cache", "--pack", "--model", str(source)]
    command += ["--quantization-encoding", encoding]
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True)


def _gguf(encoding: str, source: Path, venvs: Path) -> Path:
    """Return the path of the checkpoint as a GGUF file in a llama.cpp encoding. Writes the file if needed."""
    python = interpreter_path(venvs / "llama_cpp")
    bf16_file, target = source / "bf16.gguf", source / f"{encoding}.gguf"
    if not target.exists() and not python.exists():
        raise InputError(
            f"{target} does not exist, and the tools of llama.cpp that write it are not installed: run "
            "`python -m benchmarks.peers setup llama_cpp` first"
        )
    if not bf16_file.exists():
        part = bf16_file.with_suffix(".part")
        script = _converter(venvs / "llama_cpp.source")
        subprocess.run([python, script, source, "--outtype", "bf16", "--outfile", part], check=True)
        part.rename(bf16_file)
    if not target.exists():
        part = target.with_suffix(".part")
        subprocess.run([python, "-c", _QUANTIZE_GGUF, bf16_file, part, encoding], check=True)
        part.rename(target)
    return target


def _converter(source: Path) -> Path:
    """Return the path of llama.cpp's conversion script.

    Unpacks the source distribution in ``source`` if needed.
    """
    pattern = "*/vendor/llama.cpp/convert_hf_to_gguf.py"
    if not (scripts := sorted(source.glob(pattern))):
        (archive_file,) = source.glob("*.tar.gz")
        with tarfile.open(archive_file) as archive:
            archive.extractall(source, filter="data")
        scripts = sorted(source.glob(pattern))
    return scripts[0]


def _openvino(encoding: str, source: Path, venv: Path) -> Path:
    """Return the folder of the checkpoint as an OpenVINO model in an encoding.

    Exports the model if needed.
    """
    target = source / f"openvino-{encoding}"
    if not target.exists():
        part = source / f"openvino-{encoding}.part"
        group_options = ["--group-size", "128", "--ratio", "1.0"] if encoding == "int4" else []
        command: list[str | Path] = [venv / "bin" / "optimum-cli", "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", "--weight-format", encoding, *group_options, part]
        subprocess.run(command, check=True)
        part.rename(target)
    return target

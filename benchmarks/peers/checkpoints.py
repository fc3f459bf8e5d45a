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
    checkpoint_folder = folder / Path(shape).name
    if not (checkpoint_folder / "complete").exists():
        checkpoint_folder.mkdir(parents=True, exist_ok=True)
        config = {**_REQUIRED_BY_PEERS, **shape_config(shape), "max_position_embeddings": _MAX_POSITIONS}
        config.setdefault("architectures", [_ARCHITECTURES[config["model_type"]]])
        write_random_checkpoint(checkpoint_folder, config)
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
        (checkpoint_folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        (checkpoint_folder / "tokenizer.model").write_bytes(sentencepiece_model())
        (checkpoint_folder / "complete").touch()
    return checkpoint_folder


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
    bf16_file, gguf_file = source / "bf16.gguf", source / f"{encoding}.gguf"
    if not gguf_file.exists() and not python.exists():
        raise InputError(
            f"{gguf_file} does not exist, and the tools of llama.cpp that write it are not installed: run "
            "`python -m benchmarks.peers setup llama_cpp` first"
        )
    if not bf16_file.exists():
        partial_file = bf16_file.with_suffix(".part")
        script = _converter(venvs / "llama_cpp.source")
        subprocess.run([python, script, source, "--outtype", "bf16", "--outfile", partial_file], check=True)
        partial_file.rename(bf16_file)
    if not gguf_file.exists():
        partial_file = gguf_file.with_suffix(".part")
        subprocess.run([python, "-c", _QUANTIZE_GGUF, bf16_file, partial_file, encoding], check=True)
        partial_file.rename(gguf_file)
    return gguf_file


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
    model_folder = source / f"openvino-{encoding}"
    if not model_folder.exists():
        partial_folder = source / f"openvino-{encoding}.part"
        group_options = ["--group-size", "128", "--ratio", "1.0"] if encoding == "int4" else []
        command: list[str | Path] = [venv / "bin" / "optimum-cli", "export", "openvino", "--model", source]
        command += [
            "--task",
            "text-generation-with-past",
            "--weight-format",
            encoding,
            *group_options,
            partial_folder,
        ]
        subprocess.run(command, check=True)
        partial_folder.rename(model_folder)
    return model_folder

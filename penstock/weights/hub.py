"""Finds the checkpoint folder or GGUF file of a model.

Downloads it from the Hugging Face hub if necessary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import CheckpointError, CheckpointNotFoundError
from penstock.weights import gguf
from penstock.weights.json_files import read_json_object
from penstock.weights.safetensors import SHARD_INDEX

DEMO = "demo"
"""The name of the text model that is included in the package."""
DEMO_VOICE = "demo-voice"
"""The name of the speech model that is included in the package."""
DEMO_VISION = "demo-vision"
"""The name of the included model that reads images."""

PICKLED_FILE = "pytorch_model.bin"
"""The weight file of codecs and sentence-transformers ``Dense`` modules that have no safetensors files."""
TOKEN_WEIGHTS_FILE = "sparse_linear.pt"
"""The weight file of BGE-M3's token-weight head, for sparse embeddings."""
TOKEN_VECTORS_FILE = "colbert_linear.pt"
"""The weight file of BGE-M3's head for the vector of each token, for multi-vector output."""

_DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo"
_INCLUDED_MODELS = {
    DEMO: _DEMO_FOLDER,
    DEMO_VOICE: _DEMO_FOLDER / "voice",
    DEMO_VISION: _DEMO_FOLDER / "vision",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_DOWNLOADED_PATTERNS = (
    "*.json",
    "*.jinja",
    "*.safetensors",
    "*.model",
    "*.txt",
    TOKEN_WEIGHTS_FILE,
    TOKEN_VECTORS_FILE,
    f"*_Dense/{PICKLED_FILE}",
)
_CONVERT_HINT = "convert the model with transformers, from_pretrained(...).save_pretrained(folder)"
_ONLINE_HINT = "run once with a connection to the hub; files that are already in the cache are kept"
_IGNORED_PATTERNS = ("original/*", "consolidated*", "onnx/*", "openvino/*", "runs/*")


def resolve_checkpoint(
    model_path: str, revision: str = "main", gguf_file: str | None = None, *, resumes: bool = False
) -> Path:
    """Return the folder or the GGUF file of a checkpoint. Download it if necessary.

    Args:
        model_path: the name of an included model (``demo``, ``demo-voice``, ``demo-vision``), a folder, a
            GGUF file, or a model id on the Hugging Face hub. It is a path and never searched on the hub if it
            starts with ``.``, ``/`` or ``~``, has more than one separator, or exists.
        revision: branch, tag or commit of a hub model.
        gguf_file: name of a GGUF file in the folder or the hub model, or a unique part of the name. Without
            it, safetensors files are used if there are any, otherwise the only GGUF file.
        resumes: whether an interrupted download of a large file continues, as with ``penstock pull``.

    Raises:
        CheckpointNotFoundError: the model does not exist or cannot be reached.
        CheckpointError: the checkpoint cannot be loaded.
    """
    if model_path in _INCLUDED_MODELS:
        return _check_checkpoint(_INCLUDED_MODELS[model_path], gguf_file)
    if _is_local(model_path):
        return _check_checkpoint(Path(os.path.abspath(os.path.expanduser(model_path))), gguf_file)
    return _check_checkpoint(_download(model_path, revision, gguf_file, resumes), None)


def resolve_codec(path: str, revision: str = "main", *, resumes: bool = False) -> Path:
    """Return the folder of an audio codec. Download it if necessary.

    Codecs are published as safetensors files or as ``pytorch_model.bin``. If there are both, the safetensors
    files are used.

    Args:
        path: a folder, or a model id on the Hugging Face hub.
        revision: branch, tag or commit of a hub model.
        resumes: whether an interrupted download of a large file continues.

    Raises:
        CheckpointNotFoundError: the codec does not exist or cannot be reached.
        CheckpointError: the folder has no ``config.json`` or no weights, or a shard was not downloaded.
    """
    if _is_local(path):
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        if not folder.is_dir():
            raise CheckpointNotFoundError(folder, "no such folder: use the folder of a codec, or a hub id")
    else:
        if not HUB_ID.fullmatch(path):
            raise CheckpointNotFoundError(
                repr(path), "is neither a folder nor a hub id: write ./folder, name or namespace/name"
            )
        folder = _snapshot(path, revision, ["config.json", "*.safetensors*"], resumes=resumes)
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(path, revision, ["config.json", PICKLED_FILE], resumes=resumes)
        _check_complete(path, folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(path, "is not a codec: it has no config.json")
    if not any(folder.glob("*.safetensors")) and not (folder / PICKLED_FILE).is_file():
        raise CheckpointError(path, f"has no weights: neither *.safetensors nor {PICKLED_FILE}")
    return folder


def local_name(model_path: str) -> str:
    """Return the name under which a model is served: the name of its folder or GGUF file, or its hub id."""
    if model_path in _INCLUDED_MODELS or not _is_local(model_path):
        return model_path
    path = Path(os.path.abspath(os.path.expanduser(model_path)))
    name = path.stem if path.suffix.lower() == gguf.SUFFIX and not path.is_dir() else path.name
    return name or model_path


def is_hub_id(model_path: str) -> bool:
    """Return whether a model is searched on the hub: it is neither an included model nor a path."""
    return model_path not in _INCLUDED_MODELS and not _is_local(model_path)


def _is_local(model_path: str) -> bool:
    return (
        model_path.startswith((".", "~", "/"))
        or sum(model_path.count(separator) for separator in {"/", os.sep}) > 1
        or os.path.exists(model_path)
    )


def _check_checkpoint(path: Path, gguf_file: str | None) -> Path:
    """Return the folder or the GGUF file to load from ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` does not exist.
        CheckpointError: ``path`` is another file, or a folder without a checkpoint that can be loaded.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            path, "no such folder or GGUF file: use the path of a checkpoint, or a hub id"
        )
    if not path.is_dir():
        if path.suffix.lower() == gguf.SUFFIX:
            if gguf_file is not None and gguf_file.lower() not in path.name.lower():
                raise CheckpointError(path, f"does not match --gguf-file {gguf_file!r}")
            return gguf.part_files(path)[0]
        raise CheckpointError(path, f"is a file: use the folder that contains the checkpoint, {path.parent}")
    try:
        names = os.listdir(path)
    except OSError as problem:
        raise CheckpointError(path, f"cannot be read: {problem.strerror}") from problem
    if not names:
        raise CheckpointError(path, "is empty: use a folder with config.json and *.safetensors")
    has_weights = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    if gguf_file is not None or (not has_weights and _gguf_models(names)):
        return path / _select_gguf(path, names, gguf_file)
    reason = _folder_problem(names)
    if reason:
        raise CheckpointError(path, reason)
    return path


def _folder_problem(names: list[str]) -> str | None:
    """Return the reason why a folder with these files cannot be loaded, or None if it can be loaded."""
    endings = {Path(name).suffix for name in names}
    if ".safetensors" in endings and "config.json" in names:
        return None
    if "adapter_config.json" in names and "config.json" not in names:
        return "is a LoRA adapter, not a model: use the checkpoint of its base model"
    if "config.json" not in names:
        return "is not a checkpoint: it has no config.json"
    if endings & {".bin", ".pt", ".pth"}:
        return (
            "has only pickled weights (such as pytorch_model.bin), which can run code when they are read: "
            + _CONVERT_HINT
        )
    return "has no weights: there is a config.json but no *.safetensors file"


def _gguf_models(names: Iterable[str]) -> list[str]:
    """Return the GGUF files except the later parts of split models and the image projectors, sorted."""
    files = sorted(name for name in names if name.lower().endswith(gguf.SUFFIX))
    return [name for name in files if not _LATER_PART.search(name) and "mmproj" not in name.lower()]


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def _select_gguf(checkpoint: object, names: Iterable[str], gguf_file: str | None) -> str:
    """Return the GGUF file among ``names`` that ``gguf_file`` selects, or the only GGUF file if it is None.

    ``checkpoint`` is the folder or the hub id, for error messages.

    Raises:
        CheckpointError: no file matches, or more than one.
    """
    models = _gguf_models(names)
    pattern = (gguf_file or "").lower()
    matches = [name for name in models if pattern in name.lower()]
    exact_matches = [name for name in matches if name.lower() == pattern]
    word_matches = [
        name for name in matches if pattern in re.split(r"[-./]", name.lower())
    ]  # F16, but not BF16
    for candidates in (exact_matches, word_matches, matches):
        if len(candidates) == 1:
            return candidates[0]
    listed_names = ", ".join((matches or models)[:_MAX_LISTED])
    num_unlisted = len(matches or models) - _MAX_LISTED
    listed_names += f" and {num_unlisted} more" if num_unlisted > 0 else ""
    if not models:
        raise CheckpointError(checkpoint, f"has no GGUF file that matches --gguf-file {gguf_file!r}")
    if not matches:
        raise CheckpointError(checkpoint, f"has no GGUF file {gguf_file!r}: choose one of {listed_names}")
    raise CheckpointError(
        checkpoint,
        f"has {len(matches)} matching GGUF files: choose one of them with --gguf-file: {listed_names}",
    )


_MAX_LISTED = 20


def _download(model_id: str, revision: str, gguf_file: str | None, resumes: bool) -> Path:
    if not HUB_ID.fullmatch(model_id):
        raise CheckpointNotFoundError(
            repr(model_id), "is neither a folder nor a hub id: write ./folder, name or namespace/name"
        )
    patterns = [name for name in _DOWNLOADED_PATTERNS if gguf_file is None or name != "*.safetensors"]
    folder = _snapshot(model_id, revision, patterns, resumes=resumes)
    if gguf_file is not None or not any(folder.glob("*.safetensors")):
        models = _gguf_models(_remote_names(model_id, revision, folder))
        if not models and gguf_file is None:
            raise CheckpointError(model_id, f"has no safetensors weights on the hub: {_CONVERT_HINT}")
        name = _select_gguf(model_id, models, gguf_file)
        weights_pattern = re.sub("-00001-of-", "-*-of-", name)
        folder = _snapshot(model_id, revision, [*patterns, weights_pattern], resumes=resumes)
        if not (folder / name).exists():
            raise CheckpointError(model_id, f"{name} is not in the local cache: {_ONLINE_HINT}")
        return folder / name
    _check_complete(model_id, folder)
    return folder


def _snapshot(model_id: str, revision: str, patterns: list[str], *, resumes: bool = False) -> Path:
    """Return the folder in the hub's cache with the files that match the patterns. Download missing files.

    With ``resumes``, an interrupted download of a large file continues.
    """
    if resumes:
        from penstock.weights.resumable_download import download_large_files

        download_large_files(model_id, revision, patterns, list(_IGNORED_PATTERNS))
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(_IGNORED_PATTERNS)
        )
    except Exception as problem:  # errors of the client, the network and the disk have no common class
        raise CheckpointNotFoundError(model_id, _explanation(problem, model_id, revision)) from problem
    return Path(folder)


def _remote_names(model_id: str, revision: str, folder: Path) -> list[str]:
    """Return a model's file names on the hub, or its GGUF files in the cache if the hub cannot be reached."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(model_id, revision=revision)
    except Exception:  # errors of the client and the network have no common class
        return [str(file.relative_to(folder)) for file in folder.rglob(f"*{gguf.SUFFIX}")]


def missing_shards(folder: Path) -> list[str]:
    """Return the weight files that are in the index of a folder but do not exist."""
    return [name for name in _shards(folder) if not (folder / name).exists()]


def _shards(folder: Path) -> list[str]:
    index = folder / SHARD_INDEX
    if not index.exists():
        return []
    shards = read_json_object(index).get("weight_map")
    return sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []


def _check_complete(model_id: str, folder: Path) -> None:
    """Check that all shards were downloaded. Without a connection, a download in the cache may be incomplete.

    Raises:
        CheckpointError: shards are missing.
    """
    missing_names = missing_shards(folder)
    if missing_names:
        count = f"{len(missing_names)} of {len(_shards(folder))}"
        problem = f"{count} weight files are not in the local cache ({missing_names[0]}, ...)"
        raise CheckpointError(model_id, f"{problem}: {_ONLINE_HINT}")


def _explanation(problem: Exception, model_id: str, revision: str) -> str:
    """Return a message with the reason why a download failed and what to do next."""
    from huggingface_hub import errors

    match problem:
        case errors.GatedRepoError():
            return (
                f"is gated: accept its terms at https://huggingface.co/{model_id}, then run `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return "no such local folder and no such model on the hub; private models need `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"has no revision {revision!r} on the hub"
        case errors.HFValidationError():
            return "no such local folder, and not a valid hub id"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return (
                "no such local folder, and the hub cannot be reached or is disabled: use the path of "
                "a local checkpoint, or run once with a connection to download it"
            )
    first_line = str(problem).strip().partition("\n")[0]
    return f"cannot be downloaded from the hub (finished files are kept): {first_line}"

"""From what a user calls a model to the folder, or the GGUF file, of its checkpoint."""

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
"""The name of the embedded model."""

_DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILES_WANTED = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
_CONVERT = "convert the model with transformers, from_pretrained(...).save_pretrained(folder)"
_ONLINE = "run once online, what is there already is kept"
_FILES_UNWANTED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "runs/*")


def resolve_checkpoint(model_path: str, revision: str = "main", gguf_file: str | None = None) -> Path:
    """The folder of a checkpoint, or its GGUF file, downloaded if need be.

    Args:
        model_path: ``demo``, a folder, a GGUF file, or a model's id on the Hugging Face hub. What looks like
            a path (starts with ``.``, ``/`` or ``~``, has more than one separator, or exists) is never
            looked for on the hub.
        revision: branch, tag or commit of a hub model.
        gguf_file: which GGUF file of a folder or a hub model is meant: its name, or a part of it that no
            other has. Without it safetensors come first, and a lone GGUF file needs no name.

    Raises:
        CheckpointNotFoundError: nothing of that name can be reached.
        CheckpointError: it is there, but not a checkpoint that can be loaded.
    """
    if model_path == DEMO:
        return _checked(_DEMO_FOLDER, gguf_file)
    if _is_local(model_path):
        return _checked(Path(os.path.abspath(os.path.expanduser(model_path))), gguf_file)
    return _checked(_download(model_path, revision, gguf_file), None)


def local_name(model_path: str) -> str:
    """Return what a model is called: the name of its folder or GGUF file, or its id on the hub."""
    if model_path == DEMO or not _is_local(model_path):
        return model_path
    path = Path(os.path.abspath(os.path.expanduser(model_path)))
    name = path.stem if path.suffix.lower() == gguf.SUFFIX and not path.is_dir() else path.name
    return name or model_path


def _is_local(model_path: str) -> bool:
    return (
        model_path.startswith((".", "~", "/"))
        or sum(model_path.count(separator) for separator in {"/", os.sep}) > 1
        or os.path.exists(model_path)
    )


def _checked(folder: Path, gguf_file: str | None) -> Path:
    if not os.path.exists(folder):
        raise CheckpointNotFoundError(folder, "no such folder: give the path of a checkpoint, or a hub id")
    if not folder.is_dir():
        if folder.suffix.lower() == gguf.SUFFIX:
            if gguf_file is not None and gguf_file.lower() not in folder.name.lower():
                raise CheckpointError(folder, f"is not {gguf_file!r}, which --gguf-file asks for")
            return gguf.parts_of(folder)[0]
        raise CheckpointError(
            folder, f"is a file: give the folder that holds the checkpoint, {folder.parent}"
        )
    try:
        names = os.listdir(folder)
    except OSError as problem:
        raise CheckpointError(folder, f"cannot be read: {problem.strerror}") from problem
    if not names:
        raise CheckpointError(folder, "is empty: give a folder with config.json and *.safetensors")
    has_weights = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    if gguf_file is not None or (not has_weights and _models(names)):
        return folder / _chosen(folder, names, gguf_file)
    fault = _fault(names)
    if fault:
        raise CheckpointError(folder, fault)
    return folder


def _fault(names: list[str]) -> str | None:
    """Why a folder with these files cannot be loaded."""
    endings = {Path(name).suffix for name in names}
    if ".safetensors" in endings and "config.json" in names:
        return None
    if "adapter_config.json" in names and "config.json" not in names:
        return "is a LoRA adapter, not a model: give the checkpoint of its base model"
    if "config.json" not in names:
        return "is not a checkpoint: it has no config.json"
    if endings & {".bin", ".pt", ".pth"}:
        return (
            "has pickled weights only (such as pytorch_model.bin), which can run code when read: " + _CONVERT
        )
    return "has no weights: no *.safetensors file lies beside its config.json"


def _models(names: Iterable[str]) -> list[str]:
    """The GGUF files that are models: of one in several parts the first, and no projectors of images."""
    files = sorted(name for name in names if name.lower().endswith(gguf.SUFFIX))
    return [name for name in files if not _LATER_PART.search(name) and "mmproj" not in name.lower()]


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def _chosen(where: object, names: Iterable[str], gguf_file: str | None) -> str:
    """The one GGUF file that is meant, of those called ``names``."""
    models = _models(names)
    wanted = (gguf_file or "").lower()
    fitting = [name for name in models if wanted in name.lower()]
    exact = [name for name in fitting if name.lower() == wanted]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    listed = ", ".join((fitting or models)[:_MAX_LISTED])
    more = len(fitting or models) - _MAX_LISTED
    listed += f" and {more} more" if more > 0 else ""
    if not models:
        raise CheckpointError(where, f"has no GGUF file, and --gguf-file asks for {gguf_file!r}")
    if not fitting:
        raise CheckpointError(where, f"has no GGUF file called {gguf_file!r}, but {listed}")
    raise CheckpointError(
        where, f"has {len(fitting)} GGUF files that could be meant: choose with --gguf-file one of {listed}"
    )


_MAX_LISTED = 20


def _download(model_id: str, revision: str, gguf_file: str | None) -> Path:
    if not _HUB_ID.fullmatch(model_id):
        raise CheckpointNotFoundError(
            repr(model_id), "is neither a folder nor a hub id: write ./folder, name or namespace/name"
        )
    wanted = [name for name in _FILES_WANTED if gguf_file is None or name != "*.safetensors"]
    folder = _snapshot(model_id, revision, wanted)
    if gguf_file is not None or not any(folder.glob("*.safetensors")):
        models = _models(_remote_names(model_id, revision, folder))
        if not models and gguf_file is None:
            raise CheckpointError(model_id, f"has no safetensors weights on the hub: {_CONVERT}")
        chosen = _chosen(model_id, models, gguf_file)
        folder = _snapshot(model_id, revision, [*wanted, re.sub("-00001-of-", "-*-of-", chosen)])
        if not (folder / chosen).exists():
            raise CheckpointError(model_id, f"{chosen} is not in the local cache: {_ONLINE}")
        return folder / chosen
    _check_complete(model_id, folder)
    return folder


def _snapshot(model_id: str, revision: str, wanted: list[str]) -> Path:
    """Return the folder of the requested files; download those that are missing."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=wanted, ignore_patterns=list(_FILES_UNWANTED)
        )
    except Exception as problem:  # the client's own errors, the network's and the disk's share no class
        raise CheckpointNotFoundError(model_id, _explanation(problem, model_id, revision)) from problem
    return Path(folder)


def _remote_names(model_id: str, revision: str, folder: Path) -> list[str]:
    """The files of a model on the hub; where it cannot be asked, those that are here already."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(model_id, revision=revision)
    except Exception:  # as above: offline, or no network
        return [str(file.relative_to(folder)) for file in folder.rglob(f"*{gguf.SUFFIX}")]


def _check_complete(model_id: str, folder: Path) -> None:
    """Refuses what an interrupted download has left, which offline is all that there is."""
    index = folder / SHARD_INDEX
    if not index.exists():
        return
    shards = read_json_object(index).get("weight_map")
    names = set(shards.values()) if isinstance(shards, dict) else set()
    absent = sorted(str(name) for name in names if not (folder / str(name)).exists())
    if absent:
        missing = f"{len(absent)} of {len(names)} files of weights, {absent[0]} among them, are not"
        raise CheckpointError(model_id, f"{missing} in the local cache: {_ONLINE}")


def _explanation(problem: Exception, model_id: str, revision: str) -> str:
    """Why a download failed, and what to do next."""
    from huggingface_hub import errors

    match problem:
        case errors.GatedRepoError():
            return (
                f"is gated: accept its terms at https://huggingface.co/{model_id}, then run `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return "no such folder here, and no such model on the hub; a private one needs `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"has no revision {revision!r} on the hub"
        case errors.HFValidationError():
            return "no such folder here, and not a valid hub id"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return (
                "no such folder here, and the hub cannot be reached or is switched off: give the path of "
                "a local checkpoint, or run once online to download it"
            )
    first_line = str(problem).strip().partition("\n")[0]
    return f"cannot be downloaded from the hub (what has arrived is kept for the next time): {first_line}"

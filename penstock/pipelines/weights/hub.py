"""From what a user calls a model to the folder of its checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import CheckpointError, CheckpointNotFoundError

DEMO = "demo"
"""The name of the embedded model."""

_DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILES_WANTED = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
_CONVERT = "convert the model with transformers, from_pretrained(...).save_pretrained(folder)"
_FILES_UNWANTED = ("original/*", "consolidated*", "onnx/*", "openvino/*", "runs/*")


def resolve_checkpoint(model_path: str, revision: str = "main") -> Path:
    """The folder of a checkpoint, downloaded if need be.

    Args:
        model_path: ``demo``, a folder, or a model's id on the Hugging Face hub. What looks like a path
            (starts with ``.``, ``/`` or ``~``, has more than one separator, or exists) is never looked
            for on the hub.
        revision: branch, tag or commit of a hub model.

    Raises:
        CheckpointNotFoundError: nothing of that name can be reached.
        CheckpointError: it is there, but not a checkpoint that can be loaded.
    """
    if model_path == DEMO:
        return _checked(_DEMO_FOLDER)
    if _is_local(model_path):
        return _checked(Path(os.path.abspath(os.path.expanduser(model_path))))
    return _checked(_download(model_path, revision))


def _is_local(model_path: str) -> bool:
    return (
        model_path.startswith((".", "~", "/"))
        or sum(model_path.count(separator) for separator in {"/", os.sep}) > 1
        or os.path.exists(model_path)
    )


def _checked(folder: Path) -> Path:
    if not os.path.exists(folder):
        raise CheckpointNotFoundError(folder, "no such folder: give the path of a checkpoint, or a hub id")
    if not folder.is_dir():
        raise CheckpointError(
            folder, f"is a file: give the folder that holds the checkpoint, {folder.parent}"
        )
    try:
        names = os.listdir(folder)
    except OSError as problem:
        raise CheckpointError(folder, f"cannot be read: {problem.strerror}") from problem
    if not names:
        raise CheckpointError(folder, "is empty: give a folder with config.json and *.safetensors")
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
    if "config.json" not in names and ".gguf" not in endings:
        return "is not a checkpoint: it has no config.json"
    if ".gguf" in endings:
        return "has GGUF weights only: give a folder with config.json and *.safetensors"
    if endings & {".bin", ".pt", ".pth"}:
        return (
            "has pickled weights only (such as pytorch_model.bin), which can run code when read: " + _CONVERT
        )
    return "has no weights: no *.safetensors file lies beside its config.json"


def _download(model_id: str, revision: str) -> Path:
    if not _HUB_ID.fullmatch(model_id):
        raise CheckpointNotFoundError(
            repr(model_id), "is neither a folder nor a hub id: write ./folder, name or namespace/name"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=list(_FILES_WANTED),
            ignore_patterns=list(_FILES_UNWANTED),
        )
    except Exception as problem:  # the client's own errors, the network's and the disk's share no class
        raise CheckpointNotFoundError(model_id, _explanation(problem, model_id, revision)) from problem
    if not any(Path(folder).glob("*.safetensors")):
        raise CheckpointError(model_id, f"has no safetensors weights on the hub: {_CONVERT}")
    return Path(folder)


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
    return f"cannot be downloaded from the hub: {str(problem).strip().partition(chr(10))[0]}"

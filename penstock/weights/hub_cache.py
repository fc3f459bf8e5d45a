"""Lists and deletes models in the local cache of the Hugging Face hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError, CheckpointNotFoundError
from penstock.weights.hub import HUB_ID, missing_shards

_PREFIX = "models--"
_PARTIAL_PATTERN = "*.incomplete"


@dataclass(frozen=True)
class CachedModel:
    """One revision of a model in the cache. Revisions of a model share identical files."""

    name: str
    """The id of the model on the hub."""
    revision: str | None
    """The commit hash; None if the cache has no revision of the model, as after a partial download."""
    refs: Sequence[str]
    """The branches and tags that were resolved to this commit."""
    path: Path
    num_files: int
    num_bytes: int
    """The size of the revision's files and of all partly downloaded files of the model."""
    last_used: float
    """When a file was last read, in seconds since 1970. If no file is complete: when one was last written."""
    is_complete: bool
    """False if a shard is missing, or if any file of the model, in any revision, is partly downloaded."""


def cached_models() -> list[CachedModel]:
    """Return all revisions of all models in the cache, sorted by name and commit hash."""
    from huggingface_hub import scan_cache_dir

    cache = _cache_folder()
    if not cache.is_dir():
        return []
    models: list[CachedModel] = []
    for repo in scan_cache_dir(cache).repos:
        if repo.repo_type != "model":
            continue
        partial_files = [*_partial_files(repo.repo_path)]
        for revision in repo.revisions:
            times = [file.blob_last_accessed for file in revision.files]
            models.append(
                CachedModel(
                    repo.repo_id,
                    revision.commit_hash,
                    sorted(revision.refs),
                    revision.snapshot_path,
                    revision.nb_files,
                    revision.size_on_disk + _total_size(partial_files),
                    max(times, default=revision.last_modified),
                    not partial_files and not missing_shards(revision.snapshot_path),
                )
            )
    names_with_revision = {model.name for model in models}
    for folder in cache.glob(f"{_PREFIX}*"):
        name = folder.name.removeprefix(_PREFIX).replace("--", "/")
        if name not in names_with_revision and folder.is_dir():
            partial_files = [*_partial_files(folder)]
            last_used = max((file.stat().st_mtime for file in partial_files), default=folder.stat().st_mtime)
            models.append(
                CachedModel(name, None, (), folder, 0, _total_size(partial_files), last_used, False)
            )
    return sorted(models, key=lambda model: (model.name, model.revision or ""))


def cache_size() -> int:
    """Return the size in bytes of all models in the cache, including partly downloaded files.

    Files that revisions share are counted once.
    """
    from huggingface_hub import scan_cache_dir

    cache = _cache_folder()
    if not cache.is_dir():
        return 0
    complete_size = sum(
        repo.size_on_disk for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"
    )
    return complete_size + sum(_total_size([*_partial_files(folder)]) for folder in cache.glob(f"{_PREFIX}*"))


def cached_revision(path: Path) -> str | None:
    """Return the commit hash in the path of a checkpoint in the cache; None for other paths.

    The hash is the name of the folder below ``snapshots``.
    """
    folders = [path, *path.parents]
    return next((folder.name for folder in folders if folder.parent.name == "snapshots"), None)


def delete_model(name: str, revision: str | None = None) -> int:
    """Delete a model from the cache, and return the number of freed bytes.

    Args:
        name: the id of the model on the hub.
        revision: a branch, a tag, or the beginning of a commit hash; None deletes all revisions and partly
            downloaded files.

    Raises:
        CheckpointNotFoundError: the cache does not have the model or the revision.
        CheckpointError: several commit hashes begin with ``revision``, or a file cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir

    models = find_cached_models(name, revision)
    folder = _cache_folder() / (_PREFIX + name.replace("/", "--"))
    try:
        if revision is None:
            num_bytes = sum(file.lstat().st_size for file in folder.rglob("*") if _is_regular(file))
            shutil.rmtree(folder)
            shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
            return num_bytes
        strategy = scan_cache_dir(_cache_folder()).delete_revisions(
            *(model.revision for model in models if model.revision is not None)
        )
        strategy.execute()
    except OSError as error:
        raise CheckpointError(name, f"cannot be deleted: {error.strerror}: {error.filename}") from error
    return strategy.expected_freed_size


def find_cached_models(name: str, revision: str | None = None) -> list[CachedModel]:
    """Return all revisions of a model in the cache, or only ``revision``.

    Args:
        name: the id of the model on the hub.
        revision: a branch, a tag, or the beginning of a commit hash.

    Raises:
        CheckpointNotFoundError: the cache does not have the model or the revision.
        CheckpointError: several commit hashes begin with ``revision``.
    """
    if not HUB_ID.fullmatch(name):
        raise CheckpointNotFoundError(repr(name), "is not a hub id: write name or namespace/name")
    revisions = [model for model in cached_models() if model.name == name]
    if not revisions:
        raise CheckpointNotFoundError(name, "is not in the cache: penstock list --local lists its models")
    if revision is None:
        return revisions
    matches = [model for model in revisions if revision in model.refs]
    matches = matches or [
        model for model in revisions if model.revision is not None and model.revision.startswith(revision)
    ]
    if not matches:
        raise CheckpointNotFoundError(
            name, f"has no revision {revision!r} in the cache: it has {_commit_names(revisions)}"
        )
    if len(matches) > 1:
        raise CheckpointError(
            name, f"has several revisions that begin with {revision!r}: {_commit_names(matches)}"
        )
    return matches


def _commit_names(models: Sequence[CachedModel]) -> str:
    """Return the abbreviated commit hashes of revisions, separated by commas."""
    return ", ".join(str(model.revision)[:12] for model in models)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _partial_files(folder: Path) -> Iterator[Path]:
    return (folder / "blobs").glob(_PARTIAL_PATTERN)


def _total_size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _is_regular(file: Path) -> bool:
    """Return whether a path is a regular file instead of a link."""
    return file.is_file() and not file.is_symlink()

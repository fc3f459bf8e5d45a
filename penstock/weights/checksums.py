"""Verification of downloaded files against the hub's SHA-256 checksums."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.host.progress import LoadingProgress

_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_SIZE = 4 << 20  # bytes


def check_checksums(checkpoint: Path) -> int:
    """Check the SHA-256 of the large files of a checkpoint in the hub's cache.

    The cache stores each file under the hub's content identifier. For large files, such as weights, this is
    the SHA-256. Small files have another kind of identifier and are not checked.

    Args:
        checkpoint: a folder, or a GGUF file.

    Returns:
        The number of files that were checked; 0 if the checkpoint has no large files or is not in the cache.

    Raises:
        CheckpointError: a checksum differs. The message says how to download the file again.
    """
    files = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    blobs = {file: file.resolve() for file in files if file.is_symlink() and file.is_file()}
    checked_blobs = {file: blob for file, blob in blobs.items() if _SHA256.fullmatch(blob.name)}
    with LoadingProgress(
        sum(blob.stat().st_size for blob in checked_blobs.values()), title="checking"
    ) as progress:
        for file, blob in checked_blobs.items():
            if _sha256(blob, progress) != blob.name:
                raise CheckpointError(
                    file,
                    f"is damaged: its SHA-256 differs from the hub's; delete {blob} and download it again",
                )
    return len(checked_blobs)


def _sha256(file: Path, progress: LoadingProgress) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(_READ_SIZE):
            digest.update(part)
            progress.advance(len(part))
    return digest.hexdigest()

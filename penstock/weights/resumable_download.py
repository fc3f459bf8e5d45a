"""Downloads large files from the Hugging Face hub into its cache. An interrupted download can continue.

The library huggingface_hub keeps only complete files. This module leaves an incomplete file in the cache, and
the next download requests the missing bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import time
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from penstock.errors import CheckpointError, CheckpointNotFoundError

LARGE_BYTES = 8 * 2**20
"""Minimum size of the files that this module downloads; huggingface_hub downloads smaller files."""
_CHUNK_BYTES = 2**20
_MAX_ATTEMPTS = 5
_TIMEOUT = 30.0  # seconds
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PARTIAL_SUFFIX = ".incomplete"


class ProgressBar(Protocol):
    """Shows the number of received bytes."""

    def update(self, n: float | None = 1, /) -> bool | None: ...


def download_large_files(
    model_id: str, revision: str, allow_patterns: list[str], ignore_patterns: list[str]
) -> None:
    """Download the large files of a model that match the patterns and are not in the cache.

    If the list of the files or the metadata of a file cannot be read, the function returns without an error.
    The caller then uses huggingface_hub, which reports the error if files are missing. Files that another
    process is downloading are skipped.

    Args:
        model_id: the id of the model.
        revision: branch, tag or commit.
        allow_patterns: patterns of the files to download.
        ignore_patterns: patterns of files that are not downloaded.

    Raises:
        CheckpointNotFoundError: the server refused the request, or the connection was interrupted repeatedly.
            The next call continues the download.
        CheckpointError: the checksum of a file differs from that on the hub. The file is deleted.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, list_repo_files
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        filter_repo_objects,
        tqdm,
    )

    try:
        names = list_repo_files(model_id, revision=revision)
    except Exception:  # errors of the client, the network and the disk have no common class
        return
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{model_id.replace('/', '--')}" / "blobs"
    for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
        url = hf_hub_url(model_id, name, revision=revision)
        try:
            metadata = get_hf_file_metadata(url)
        except Exception:  # the errors have no common class, as in list_repo_files
            return
        size, etag = metadata.size, metadata.etag
        if size is None or etag is None or size < LARGE_BYTES or (blobs / etag).exists():
            continue
        is_on_hub = urlsplit(metadata.location).netloc == urlsplit(url).netloc
        headers = build_hf_headers() if is_on_hub else {}  # the token must not be sent to other hosts
        blobs.mkdir(parents=True, exist_ok=True)
        partial_path = blobs / (etag + _PARTIAL_SUFFIX)
        with partial_path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another process is downloading the file
                continue
            num_present_bytes = file.tell()
            with tqdm(  # type: ignore[no-untyped-call]
                total=size, initial=num_present_bytes, unit="B", unit_scale=True, desc=name
            ) as bar:
                _append_missing_bytes(model_id, Request(metadata.location, headers=headers), file, size, bar)
            _check_sha256(model_id, name, partial_path, etag)
            partial_path.rename(blobs / etag)


def _append_missing_bytes(
    model_id: str, request: Request, file: BinaryIO, size: int, bar: ProgressBar
) -> None:
    """Append bytes to ``file`` until it has ``size`` bytes, in up to `_MAX_ATTEMPTS` requests."""
    reason = "the server closed the connection early"
    for attempt in range(_MAX_ATTEMPTS):
        if attempt > 0:
            time.sleep(2**attempt / 2)
        num_present_bytes = file.tell()
        request.remove_header("Range")
        if num_present_bytes > 0:
            request.add_header("Range", f"bytes={num_present_bytes}-")
        try:
            if num_present_bytes < size:
                with urlopen(request, timeout=_TIMEOUT) as response:
                    if (
                        num_present_bytes > 0 and response.status != 206
                    ):  # the server ignored Range and sends the whole file
                        file.truncate(0)
                        file.seek(0)
                        bar.update(-num_present_bytes)
                    while chunk := response.read(_CHUNK_BYTES):
                        file.write(chunk)
                        file.flush()
                        bar.update(len(chunk))
        except HTTPError as error:
            raise CheckpointNotFoundError(model_id, f"cannot be downloaded: {error}") from error
        except (URLError, OSError) as error:
            reason = str(error)
        if file.tell() >= size:
            return
    raise CheckpointNotFoundError(
        model_id, f"the download was interrupted ({reason}): run the command again to continue it"
    )


def _check_sha256(model_id: str, name: str, path: Path, etag: str) -> None:
    """Compare the SHA-256 of a file with its ETag. The ETag of large files on the hub is their SHA-256."""
    if _SHA256.fullmatch(etag):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != etag:
            path.unlink()
            raise CheckpointError(
                model_id, f"{name} was not downloaded correctly and was deleted: run the command again"
            )

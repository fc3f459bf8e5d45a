"""``penstock pull``, ``rm`` and ``list --local`` with a local hub server."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from penstock.errors import CheckpointError
from penstock.weights import hub_cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
LARGE_FILE_SIZE = 24 * 2**20
"""Size of the large file in bytes. Penstock downloads files of at least 8 MiB without huggingface_hub."""
STALL_OFFSET = 21 * 2**20
"""Number of bytes of the large file after which the server stalls."""

FILES: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "README.md": b"# Not needed",
    "pytorch_model.bin": b"not needed",
    "onnx/model.onnx": b"not needed",
    "original/model.safetensors": b"not needed",
    "model.safetensors": b"\x01" * LARGE_FILE_SIZE,
}
GGUF_FILES: dict[str, bytes] = {
    "config.json": b"{}",
    "m-Q4_K_M.gguf": b"four" * 100,
    "m-Q8_0.gguf": b"eight" * 100,
}
REPOSITORIES = {"tiny/llama": FILES, "tiny/gguf": GGUF_FILES}


class Hub:
    """The state of a hub server: the downloads so far, and the faults to produce."""

    def __init__(self, url: str, cache: Path) -> None:
        self.url, self.cache = url, cache
        self.ranges: list[tuple[str, str | None]] = []
        """The file name and the header ``Range`` of each download."""
        self.commit = COMMIT
        self.should_stall = False
        """Whether a download of the large file stops at `STALL_OFFSET` and ends when `released` is set."""
        self.num_breaks = 0
        """Number of the next downloads of the large file that end after 2 MiB."""
        self.etag: str | None = None
        """A wrong checksum for the server to report; None for the correct one."""
        self.stalled = threading.Event()
        self.released = threading.Event()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``penstock`` with ``arguments``, this hub and its cache, which is empty at first."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": self.url, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Run ``penstock`` with ``arguments``. Return its standard output and standard error."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        return output, errors

    def list_local(self) -> list[dict[str, Any]]:
        """Return the rows of ``penstock list --local``."""
        rows: list[dict[str, Any]] = json.loads(self.run("list", "--local", "--json")[0])["models"]
        return rows


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(has_body=False)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if match := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(/(revision|tree)/([\w-]+))?/?", path):
                files = REPOSITORIES.get(match[1])
                if files is None:
                    self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                    return
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                siblings = [{"rfilename": name} for name in files]
                model_info = {"id": match[1], "sha": hub.commit, "siblings": siblings, "private": False}
                self._send(200, json.dumps(entries if match[3] == "tree" else model_info).encode(), {})
            else:
                self._file(has_body=True)

        def _file(self, has_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            match = re.fullmatch(r"/([\w-]+/[\w-]+)/resolve/([\w-]+)/(.*)", path)
            data = REPOSITORIES.get(match[1], {}).get(match[3]) if match else None
            if match is None or data is None:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            etag = hub.etag or hashlib.sha256(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit}
            if not has_body:
                self._send(200, data, headers, has_body=False)
                return
            byte_range = self.headers.get("Range")
            hub.ranges.append((match[3], byte_range))
            start = int(byte_range.removeprefix("bytes=").partition("-")[0]) if byte_range else 0
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if start else 200, data[start:], headers)

        def _send(self, status: int, data: bytes, headers: dict[str, str], has_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not has_body:
                return
            if hub.should_stall and len(data) > STALL_OFFSET:
                self.wfile.write(data[:STALL_OFFSET])
                self.wfile.flush()
                hub.stalled.set()
                hub.released.wait(60)
                self.close_connection = True
                return
            if hub.num_breaks > 0 and len(data) > 2**21:
                hub.num_breaks -= 1
                self.wfile.write(data[: 2**21])
                self.close_connection = True
                return
            self.wfile.write(data)

    return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    fake_hub = Hub("", tmp_path / "hf")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake_hub))
    fake_hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield fake_hub
    fake_hub.released.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_model_is_pulled_listed_and_removed(hub: Hub) -> None:
    output, errors = hub.run("pull", "tiny/llama")
    assert output.startswith("tiny/llama: 24.0 MiB in 3 files, ")
    assert "100%" in errors  # the progress bar is on standard error
    assert {name for name, _ in hub.ranges} == {"config.json", "tokenizer.json", "model.safetensors"}
    folder = Path(output.strip().rpartition(", ")[2])
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.ranges.clear()
    assert json.loads(hub.run("pull", "tiny/llama", "--json")[0]) == {
        "model": "tiny/llama",
        "path": str(folder),
        "revision": COMMIT,
        "num_files": 3,
        "num_bytes": LARGE_FILE_SIZE + len(FILES["config.json"]) + 2,
    }
    assert not hub.ranges  # the second call downloads nothing
    (row,) = hub.list_local()
    assert (row["model"], row["revision"], row["refs"], row["is_complete"]) == (
        "tiny/llama",
        COMMIT,
        ["main"],
        True,
    )
    assert (row["num_files"], row["num_bytes"]) == (3, LARGE_FILE_SIZE + len(FILES["config.json"]) + 2)
    assert abs(row["last_used"] - time.time()) < 600
    table = hub.run("list", "--local")[0]
    assert re.search(r"^tiny/llama +0123456789ab +main +24\.0 MiB +now *$", table, re.MULTILINE)
    hub.commit = OLDER_COMMIT  # a second revision with the same files
    hub.run("pull", "tiny/llama", "--revision", "older")
    assert [row["refs"] for row in hub.list_local()] == [["main"], ["older"]]
    assert "total 24.0 MiB" in hub.run("list", "--local")[0]  # files shared by revisions count once
    hub.run("rm", "tiny/llama", "--revision", "older", "--yes")
    assert [row["refs"] for row in hub.list_local()] == [["main"]]
    assert folder.exists()
    output, _ = hub.run("rm", "tiny/llama", "--yes")
    assert output == "tiny/llama: 24.0 MiB freed\n"
    assert not folder.exists()
    assert hub.list_local() == []
    assert not [file for file in hub.cache.rglob("*") if file.is_file() and "tiny" in str(file)]


def test_an_interrupted_download_is_continued(hub: Hub) -> None:
    hub.should_stall = True
    process = hub.start("pull", "tiny/llama")
    assert hub.stalled.wait(60)
    blob_folder = hub.cache / "hub" / "models--tiny--llama" / "blobs"
    deadline = time.monotonic() + 30
    while not (
        partial_files := [blob for blob in blob_folder.glob("*.incomplete") if blob.stat().st_size > 2**20]
    ):
        assert time.monotonic() < deadline, "no partial file was written"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    num_written_bytes = partial_files[0].stat().st_size
    assert 0 < num_written_bytes < LARGE_FILE_SIZE
    (row,) = hub.list_local()
    assert not row["is_complete"]
    assert row["num_bytes"] >= num_written_bytes
    assert "incomplete" in hub.run("list", "--local")[0]
    hub.should_stall = False
    hub.released.set()
    hub.ranges.clear()
    output, _ = hub.run("pull", "tiny/llama")
    assert ("model.safetensors", f"bytes={num_written_bytes}-") in hub.ranges
    folder = Path(output.strip().rpartition(", ")[2])
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.list_local()[0]["is_complete"]


def test_a_download_continues_after_a_broken_connection(hub: Hub) -> None:
    hub.num_breaks = 2
    output, _ = hub.run("pull", "tiny/llama")
    ranges = [byte_range for name, byte_range in hub.ranges if name == "model.safetensors"]
    assert ranges == [None, f"bytes={2**21}-", f"bytes={2**22}-"]
    folder = Path(output.strip().rpartition(", ")[2])
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_download_with_a_wrong_checksum_is_deleted(hub: Hub) -> None:
    hub.etag = "0" * 64
    _, errors = hub.run("pull", "tiny/llama", status=2)
    assert "model.safetensors was not downloaded correctly" in errors
    assert not [*hub.cache.rglob("*.incomplete")]


def test_rm_deletes_a_partial_download(hub: Hub) -> None:
    blob_folder = hub.cache / "hub" / "models--tiny--llama" / "blobs"
    blob_folder.mkdir(parents=True)
    (blob_folder / "0.incomplete").write_bytes(b"x" * 2**20)
    (row,) = hub.list_local()
    assert (row["model"], row["revision"], row["is_complete"]) == ("tiny/llama", None, False)
    assert hub.run("rm", "tiny/llama", "-y")[0] == "tiny/llama: 1.0 MiB freed\n"
    assert not blob_folder.exists()


def test_a_single_gguf_file_can_be_pulled(hub: Hub) -> None:
    hub.run("pull", "tiny/gguf", "--gguf-file", "q4_k_m")
    assert {name for name, _ in hub.ranges} == {"config.json", "m-Q4_K_M.gguf"}


def test_invalid_arguments_are_refused(hub: Hub) -> None:
    for arguments, message in (
        (("pull", "tiny/none"), "no such model on the hub"),
        (("pull", "./folder"), "is not a model of the hub"),
        (("pull", "demo"), "is not a model of the hub"),
        (("pull", "tiny/gguf"), "has 2 matching GGUF files"),
        (("rm", "tiny/llama"), "is not in the cache"),
        (("rm", "../x", "-y"), "is not a hub id"),
    ):
        _, errors = hub.run(*arguments, status=2)
        line = errors.strip().splitlines()[-1]
        assert line.startswith("penstock: error: "), errors
        assert message in line
    hub.run("pull", "tiny/gguf", "--gguf-file", "q8_0")
    _, errors = hub.run("rm", "tiny/gguf", "--revision", "ff", "-y", status=2)
    assert "has no revision 'ff' in the cache" in errors
    _, errors = hub.run("rm", "tiny/gguf", status=130)  # standard input has no answer to the question
    assert "Delete tiny/gguf (0123456789ab)?" in errors
    assert len(hub.list_local()) == 1


def test_the_error_for_an_ambiguous_revision_names_only_the_matching_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [
        hub_cache.CachedModel("a/b", commit, (), Path(commit), 1, 1, 0.0, True)
        for commit in ("ab12" * 10, "ab34" * 10, "cd56" * 10)
    ]
    monkeypatch.setattr(hub_cache, "cached_models", lambda: models)
    with pytest.raises(CheckpointError) as caught:
        hub_cache.find_cached_models("a/b", "ab")
    assert str(caught.value).endswith("several revisions that begin with 'ab': ab12ab12ab12, ab34ab34ab34")

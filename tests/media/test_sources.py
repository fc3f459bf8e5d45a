"""Images by URL: data URLs, files below a folder, and http(s) URLs with the address check."""

from __future__ import annotations

import _socket
import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InputError
from penstock.media import sources
from penstock.media.sources import ImageSources, decode_data_url, is_public, public_address

IMAGE_BYTES = b"\x89PNG image"


def test_data_urls_are_decoded_or_refused() -> None:
    encoded_image = base64.b64encode(IMAGE_BYTES).decode()
    assert decode_data_url(f"data:image/png;base64,{encoded_image}") == IMAGE_BYTES
    assert (
        decode_data_url(f"data:image/png;name=a;base64,{encoded_image[:5]}\n{encoded_image[5:]}")
        == IMAGE_BYTES
    )
    assert decode_data_url("data:image/png,%41b") == b"Ab"
    for invalid, message in {
        "data:image/png;base64,A": "base64 of a data: URL is not valid",
        "data:image/png;base64,äöü=": "base64 of a data: URL is not valid",
        "data:text/html;base64,QQ==": "must have the form data:image/png",
        "data:image/png": "must have the form data:image/png",
    }.items():
        with pytest.raises(InputError, match=message):
            decode_data_url(invalid)
    with pytest.raises(InputError, match="has 10 bytes, but the limit is 9"):
        ImageSources(9, 1).read(f"data:image/png;base64,{encoded_image}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "does not fetch images: .*--allow-image-urls"),
        ("file:///etc/passwd", "reads no image files: .*--image-dir"),
        ("ftp://example.org/a.png", "must begin with data:"),
        ("a.png", "must begin with data:"),
        ("", "must begin with data:"),
        ("https://" + "a" * 3000, "has 3008 characters"),
    ],
)
def test_sources_that_are_not_allowed_are_refused(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageSources(1000, 1).read(url)


def test_only_files_below_the_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(IMAGE_BYTES)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    images = ImageSources(1000, 1, folder=folder)
    assert images.read("file:///sub/a%20b.png") == IMAGE_BYTES
    assert images.read(f"file://{folder}/sub/a%20b.png") == IMAGE_BYTES
    for invalid in (
        "/../secret.png",
        "/link.png",
        "/sub",
        "/missing.png",
        f"{tmp_path}/secret.png",
        "/%2e%2e/secret.png",
    ):
        with pytest.raises(InputError, match="is not below --image-dir, or does not exist"):
            images.read(f"file://{invalid}")
    with pytest.raises(InputError, match="must have the form file:///path"):
        images.read("file://host/sub/a.png")
    with pytest.raises(InputError, match="has 10 bytes"):
        ImageSources(5, 1, folder=folder).read("file:///sub/a%20b.png")


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 "
    "::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 "
    "2002:7f00:1:: 192.0.2.1 198.18.0.1 240.0.0.1 192.0.0.192 192.88.99.1 168.63.129.16 64:ff9b:1::1 "
    "2001:0:7f00:1:: 2001:db8::1 3fff::1 5f00::1 fec0::1 ::127.0.0.1 ::ffff:0:127.0.0.1 "
    "2001:470:1:18:0:5efe:127.0.0.1 2001:470:1:18:200:5efe:10.0.0.1 ::ffff:168.63.129.16 "
    "fd00::5efe:8.8.8.8 fe80::5efe:8.8.8.8 fec0::5efe:8.8.8.8 ff02::5efe:8.8.8.8".split(),
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_allowed() -> None:
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1111")
    assert is_public("64:ff9b::808:808")
    assert is_public("2001:470:1:18:0:5efe:8.8.8.8")
    assert is_public("::ffff:8.8.8.8")


@pytest.mark.parametrize(
    "host",
    "127.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 [::1] [::ffff:127.0.0.1] [::ffff:7f00:1] "
    "[0:0:0:0:0:0:0:1] 0 0.0.0.0 [::] 169.254.169.254 10.0.0.1 [fec0::1]".split(),
)
def test_notations_of_addresses_that_are_not_public_are_refused(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numeric(host: str, port: int, **_: Any) -> list[Any]:
        return _socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", numeric)
    with pytest.raises(InputError, match="is not on the public internet"):
        ImageSources(1000, 10, allow_urls=True).read(f"http://{host}:80/a.png")


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a.png",
        "http:a.png",
        "http://@127.0.0.1/",
        "http://images.test@127.0.0.1/",
        "http://127.0.0.1\\@images.test/",
        "http://127.0.0.1#@images.test/",
        "http://[::1/",
        "http://[127.0.0.1]/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:x/",
        "http://localhost/\r\nHost: a",
        "hTTp://localhost/",  # a local address, in spite of the case of the scheme
    ],
)
def test_malformed_misleading_and_local_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        ImageSources(1000, 10, allow_urls=True).read(url)


def test_each_address_of_a_host_must_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 80)) for address in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InputError, match="not on the public internet"):
        public_address("example.org", 80)


class FakeImageHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        action, _, remainder = self.path.lstrip("/").partition("/")
        if action == "to":
            self.send_response(302)
            self.send_header("Location", remainder)
            self.end_headers()
        elif action == "status":
            self.send_error(int(remainder))
        elif action == "endless":
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 1000)
        elif action == "parts":
            self._send_endless_response(remainder)
        elif action == "empty":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        elif action == "chunked":
            self.wfile.write(
                CHUNKED_HEADERS + 2 * (b"%x\r\n%b\r\n" % (len(IMAGE_BYTES), IMAGE_BYTES)) + b"0\r\n\r\n"
            )
        elif action == "slow":
            self.send_response(200)
            self.end_headers()
            threading.Event().wait(1)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(IMAGE_BYTES + self.headers["Host"].encode())

    def _send_endless_response(self, response_name: str) -> None:
        """Send bytes until the client closes the connection."""
        first_bytes, repeated_bytes = ENDLESS_RESPONSES[response_name]
        with suppress(OSError):
            self.wfile.write(first_bytes)
            while True:
                self.wfile.write(repeated_bytes)
                time.sleep(0 if len(repeated_bytes) > 100 else 0.01)

    def log_message(self, *_: object) -> None:
        pass


CHUNKED_HEADERS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS_RESPONSES = {
    "status": (b"", b"H"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "header": (b"HTTP/1.1 200 OK\r\nA: ", b"a"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", b"a"),
    "chunk-size": (CHUNKED_HEADERS, b"0"),
    "chunk-comment": (CHUNKED_HEADERS + b"1;", b"a"),
    "empty-chunks": (CHUNKED_HEADERS, b"1\r\na\r\n"),
    "trailers": (CHUNKED_HEADERS + b"0\r\n", b"A: a\r\n"),
    "many-continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "many-trailers": (CHUNKED_HEADERS + b"0\r\n", b"A: a\r\n" * 10_000),
}
"""For each kind of response: its first bytes, and the bytes that the server then repeats without end.

Up to 100 bytes are repeated every 10 ms, and longer ones without a pause.
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), FakeImageHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def fetch(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bytes]:
    """Return a function that fetches a path from a local server.

    The address check accepts the server under the name ``images.test``.
    """

    def address(host: str, _: int) -> str:
        return "127.0.0.1" if host == "images.test" else public_address(host, port)

    monkeypatch.setattr(sources, "public_address", address)
    images = ImageSources(5000, 0.5, allow_urls=True)
    return lambda path: images.read(f"http://images.test:{port}/{path}")


def test_images_are_fetched(fetch: Callable[[str], bytes], port: int) -> None:
    assert fetch("a.png?x=1") == IMAGE_BYTES + f"images.test:{port}".encode()
    assert fetch("to//a.png").startswith(IMAGE_BYTES)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("to/http://127.0.0.1/a.png", "not on the public internet"),
        ("to/http://[::1]/a.png", "not on the public internet"),
        ("to/file:///etc/passwd", "must be http"),
        ("to/http://me:pass@images.test/", "without a user and a password"),
        ("to//to//to//to//to//a.png", "redirects more than 3 times"),
        ("status/404", "the status is 404"),
        ("endless", "bytes, but the limit is 5000"),
        ("slow", "not fetched within 0.5 s"),
    ],
)
def test_failed_fetches_are_errors(fetch: Callable[[str], bytes], path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fetch(path)


@pytest.mark.parametrize("response_name", ENDLESS_RESPONSES)
def test_endless_responses_are_ended_by_the_time_limit_or_a_size_limit(
    port: int, fetch: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch, response_name: str
) -> None:
    """The time limit covers the whole response. A server cannot extend it by sending data slowly."""
    monkeypatch.setattr(sources, "_MAX_HEADER_BYTES", 20_000)
    images = ImageSources(5000, 10 if response_name.startswith("many") else 0.15, allow_urls=True)
    with pytest.raises(InputError, match=r"not fetched within|size limit"):
        images.read(f"http://images.test:{port}/parts/{response_name}")


def test_empty_and_chunked_bodies_are_read(fetch: Callable[[str], bytes]) -> None:
    assert fetch("empty") == b""
    assert fetch("chunked") == IMAGE_BYTES * 2


def test_look_ups_end_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the name server does not answer, requests still end, and at most ``_MAX_LOOKUPS`` threads wait."""
    release_lookups, lookups = threading.Event(), threading.Semaphore(0)

    def hang(*_: Any, **__: Any) -> list[Any]:
        lookups.release()
        release_lookups.wait(20)
        return [(0, 0, 0, "", ("127.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(sources, "_MAX_LOOKUPS", 2)
    images = ImageSources(5000, 0.05, allow_urls=True)
    for _ in range(4):
        with pytest.raises(InputError, match=r"not fetched within 0\.05 s"):
            images.read("http://slow.test/a.png")
    assert lookups.acquire(timeout=5)
    assert lookups.acquire(timeout=5)
    assert not lookups.acquire(blocking=False), "more than two look-ups ran"
    release_lookups.set()
    images_with_long_limit = ImageSources(5000, 10, allow_urls=True)
    with pytest.raises(InputError, match="not on the public internet"):
        images_with_long_limit.read("http://slow.test/a.png")

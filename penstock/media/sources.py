"""`ImageSources`: reads the images of requests from ``data:``, ``http(s):`` and ``file:`` URLs.

Each read has a size limit, and each fetch over HTTP also has a time limit.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import os
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from penstock import __version__
from penstock.errors import InputError

_MAX_REDIRECTS = 3
_MAX_URL_LENGTH = 2048
"""Maximum number of characters of an ``http(s):`` or ``file:`` URL."""
_PORTS = {"http": 80, "https": 443}
_CHUNK_SIZE = 64 * 1024
_MAX_HEADER_BYTES = 256 * 1024
"""Maximum number of bytes of the headers and chunk headers of a response.

The limit of a whole response is this number plus twice the maximum size of an image.
"""
_MAX_LOOKUPS = 16
"""Maximum number of concurrent DNS look-ups. A look-up that has exceeded the time limit counts until it ends.
"""


@dataclass(frozen=True)
class ImageSources:
    """The allowed sources of the images of requests.

    Args:
        max_bytes: maximum size of an image file.
        timeout: maximum number of seconds to fetch a URL, including DNS look-ups and redirects.
        allow_urls: whether ``http(s):`` URLs are allowed.
        folder: the folder whose files ``file:`` URLs may refer to; None if ``file:`` URLs are not allowed.
    """

    max_bytes: int
    timeout: float
    allow_urls: bool = False
    folder: Path | None = None
    _lookups: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_MAX_LOOKUPS), repr=False, compare=False
    )

    def read(self, url: str) -> bytes:
        """Return the content of the image file at a URL. The call blocks, so it should run in a thread.

        Raises:
            InputError: the URL is not allowed, or the file cannot be read within the limits.
        """
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            data = decode_data_url(url)
            self._check_size(len(data))
            return data
        if len(url) > _MAX_URL_LENGTH:
            raise InputError(f"an image URL has {len(url)} characters: at most {_MAX_URL_LENGTH} are allowed")
        if scheme in _PORTS:
            if not self.allow_urls:
                raise InputError(
                    "this server does not fetch images: send a data: URL, or start it with --allow-image-urls"
                )
            return self._fetch(url)
        if scheme == "file":
            return self._read_file(url)
        raise InputError("an image URL must begin with data:, https:, http: or file:")

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise InputError(
                f"the image has {size} bytes, but the limit is {self.max_bytes} (--max-image-bytes)"
            )

    # -- Files ------------------------------------------------------------------------------------------

    def _read_file(self, url: str) -> bytes:
        if self.folder is None:
            raise InputError(
                "this server reads no image files: send a data: URL, or start it with --image-dir"
            )
        url_parts = urlsplit(url)
        if url_parts.netloc not in ("", "localhost") or url_parts.query or url_parts.fragment:
            raise InputError("a file: URL must have the form file:///path, below --image-dir")
        folder = self.folder.resolve()
        url_path = Path(unquote(url_parts.path))
        try:
            path = (
                url_path.resolve()
                if url_path.is_relative_to(folder)
                else (folder / url_path.relative_to("/")).resolve()
            )
            is_in_folder = path.is_relative_to(folder) and path.is_file()
        except (OSError, ValueError):
            is_in_folder = False
        if not is_in_folder:
            raise InputError("the file of an image is not below --image-dir, or does not exist")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                self._check_size(os.fstat(descriptor).st_size)
                return file.read(self.max_bytes + 1)
        except OSError as error:
            raise InputError(f"the file of an image cannot be read: {error.strerror}") from None

    # -- HTTP -------------------------------------------------------------------------------------------

    def _fetch(self, url: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                body_or_url = self._get(url, deadline)
                if isinstance(body_or_url, bytes):
                    return body_or_url
                url = body_or_url
        except InputError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline or isinstance(error, TimeoutError):
                raise InputError(f"the image was not fetched within {self.timeout:g} s") from None
            raise InputError(f"the image cannot be fetched: {type(error).__name__}") from None
        raise InputError(f"the image URL redirects more than {_MAX_REDIRECTS} times")

    def _address(self, host: str, port: int, deadline: float) -> str:
        """Return `public_address` of a host. A DNS look-up runs in a thread, because it has no time limit."""
        if not self._lookups.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise TimeoutError
        lookup: Future[str] = Future()

        def look_up() -> None:
            try:
                address = public_address(host, port)
            except Exception as error:
                lookup.set_exception(error)
            else:
                lookup.set_result(address)
            finally:
                self._lookups.release()

        threading.Thread(target=look_up, name="penstock-lookup", daemon=True).start()
        return lookup.result(timeout=max(deadline - time.monotonic(), 0.001))

    def _get(self, url: str, deadline: float) -> bytes | str:
        """Return the body at a URL, or the URL to which it redirects."""
        url_parts = urlsplit(url)
        if (
            url_parts.scheme not in _PORTS
            or not url_parts.hostname
            or url_parts.username
            or url_parts.password
        ):
            raise InputError("an image URL must be http(s) with a host, without a user and a password")
        port = url_parts.port or _PORTS[url_parts.scheme]
        address = self._address(url_parts.hostname, port, deadline)
        connected_socket = _connect(url_parts, address, port, deadline)
        try:
            connection = http.client.HTTPConnection(url_parts.hostname, port)
            max_bytes = 2 * self.max_bytes + _MAX_HEADER_BYTES
            connection.sock = _DeadlineConnection(connected_socket, deadline, max_bytes)
            target = (url_parts.path or "/") + (f"?{url_parts.query}" if url_parts.query else "")
            headers = {
                "User-Agent": f"penstock/{__version__}",
                "Accept": "image/*",
                "Accept-Encoding": "identity",
            }
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                location = response.getheader("Location")
                if not location or len(location) > _MAX_URL_LENGTH:
                    raise InputError("the image URL redirects without a valid Location header")
                return urljoin(url, location)
            if response.status != 200:
                raise InputError(f"the image cannot be fetched: the status is {response.status}")
            length = response.getheader("Content-Length")
            if length is not None and length.isdecimal():
                self._check_size(int(length))
            data = bytearray()
            while True:
                chunk = response.read1(_CHUNK_SIZE)
                if not chunk:
                    return bytes(data)
                data += chunk
                self._check_size(len(data))
        finally:
            connected_socket.close()


def decode_data_url(url: str) -> bytes:
    """Return the content of a ``data:`` URL.

    Raises:
        InputError: the URL has no comma, the media type is not an image type, or the base64 is invalid.
    """
    head, comma, body = url.partition(",")
    media_type, *options = head[5:].split(";")
    if not comma or (media_type and not media_type.lower().startswith("image/")):
        raise InputError("a data: URL of an image must have the form data:image/png;base64,...")
    if "base64" not in (option.strip().lower() for option in options):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(unquote(body).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the base64 of a data: URL is not valid: {error}") from None


def public_address(host: str, port: int) -> str:
    """Return an IP address of a host. All addresses of the host must be on the public internet.

    The caller connects to the returned address instead of the host name. A second look-up could return a
    private address (DNS rebinding).

    Raises:
        InputError: the host has an address that is private, loopback, link-local or otherwise special.
        OSError: the host cannot be resolved.
    """
    address_infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(socket_address[0]) for *_, socket_address in address_infos]
    for address in addresses:
        if not is_public(address):
            raise InputError("the host of an image URL is not on the public internet")
    return addresses[0]


def is_public(address_text: str) -> bool:
    """Return whether an IP address is global: not private, loopback, link-local, multicast or reserved.

    If an IPv6 address contains an IPv4 address, the IPv4 address must be global.
    """
    address = ipaddress.ip_address(address_text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        last_ipv4 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        embedded_ipv4 = (
            address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        )
        embedded_ipv4 = embedded_ipv4 or (last_ipv4 if address in _NAT64 else None)
        if embedded_ipv4 is not None:
            return is_public(str(embedded_ipv4))
        if int(address) >> 32 & _ISATAP_MASK == _ISATAP and not is_public(str(last_ipv4)):
            return False
    if any(address in network for network in _SPECIAL_NETWORKS if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP, _ISATAP_MASK = 0x5EFE, 0xFDFFFFFF
"""Bits 32 to 63 of an ISATAP address, which ends with an IPv4 address (RFC 5214).

The mask clears the universal/local bit, which can be 0 or 1.
"""
_SPECIAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is the metadata service of a cloud provider
            "192.88.99.0/24",  # 6to4 relays
            "168.63.129.16/32",  # a cloud provider's host services for virtual machines
            "3fff::/20",  # documentation
            "fec0::/10",  # site-local
        ),
    )
)
"""Networks that are not public, although `ipaddress` reports them as global in some Python versions."""


class _Reader(io.RawIOBase):
    """Reads at most ``max_bytes`` bytes from a socket, until a deadline.

    A plain socket timeout is not enough, because it restarts with each byte that the server sends.
    """

    def __init__(self, connected_socket: socket.socket, deadline: float, max_bytes: int) -> None:
        self._socket = connected_socket
        self._deadline = deadline
        self._num_remaining_bytes = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._socket.settimeout(seconds)
        count = self._socket.recv_into(buffer)
        self._num_remaining_bytes -= count
        if self._num_remaining_bytes < 0:
            raise InputError("the response of an image server exceeds the size limit")
        return count


class _DeadlineConnection:
    """A connected socket for `http.client` whose response must end before a deadline.

    The caller closes the socket.
    """

    def __init__(self, connected_socket: socket.socket, deadline: float, max_bytes: int) -> None:
        self._socket = connected_socket
        self._reader = _Reader(connected_socket, deadline, max_bytes)

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self._reader)

    def close(self) -> None:
        pass  # does nothing, because http.client calls it before the response is read


def _connect(parts: SplitResult, address: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that is connected to an IP address, with TLS for the host of an ``https:`` URL.

    Each operation, such as the whole TLS handshake, must end before the deadline.
    """
    seconds = max(deadline - time.monotonic(), 0.001)
    stream_socket = socket.create_connection((address, port), timeout=seconds)
    try:
        if parts.scheme == "https":
            stream_socket.settimeout(max(deadline - time.monotonic(), 0.001))
            stream_socket = ssl.create_default_context().wrap_socket(
                stream_socket, server_hostname=parts.hostname
            )
        stream_socket.settimeout(max(deadline - time.monotonic(), 0.001))
    except BaseException:
        stream_socket.close()
        raise
    return stream_socket

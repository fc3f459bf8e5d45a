"""Protection of a server against pages of other sites in a browser, mainly for servers without an API key.

A page of any site can send requests to a server on the browser's machine (a simple ``POST``). The browser
gives these requests a foreign ``Origin``. With DNS rebinding, a page can also make the browser treat the
server as part of the page's site. The browser gives these requests a foreign ``Host``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.serve.config import ServeConfig
from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.observability.request_record import RequestRecord

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods without side effects. Without CORS headers, a page of another site cannot read their responses."""


class OriginMiddleware:
    """Refuses requests from pages of other sites.

    If the server has no API key, a request with side effects must have no ``Origin``, the server's own
    origin, or one of ``--cors-origins``. If a browser sends ``Sec-Fetch-Site``, this header decides whether
    the origin is the server's own.

    ``Host`` is checked if ``--allowed-hosts`` is set, or if the server listens at a loopback address without
    a key. In other cases it is not checked, because the server may have host names that are not configured.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._origins = frozenset(config.cors_origins)
        self._has_key = bool(config.api_key)
        self._allowed_hosts: Sequence[str] | None = config.allowed_hosts or None  # None: all hosts
        self._own_host = config.host.lower()
        if self._allowed_hosts is None and is_loopback(config.host) and not self._has_key:
            self._allowed_hosts = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or refuse it."""
        if scope["type"] == "http":
            try:
                self.check(scope)
            except RequestProblem as error:
                problem = problem_of(error)
                record: RequestRecord = scope["state"]["record"]
                record.failed(problem.code, problem.status)
                await problem.response(scope["path"], record.request_id)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Check the headers of a request.

        Raises:
            RequestProblem: 400 several ``Host`` headers, or none in HTTP/1.1 or later; 403 a foreign origin,
                if the server has no API key; 421 a host that is not allowed.
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and scope["http_version"] not in ("1.0", "0.9")):
            raise RequestProblem(
                400,
                f"the request has {len(hosts)} Host headers: send one",
                code="invalid_http",
                headers={"connection": "close"},
            )
        host = hosts[0] if hosts else None  # browsers always send a Host header
        if host is not None and not self._is_allowed(host):
            raise RequestProblem(
                421,
                f"the host {host[:100]!r} is not allowed: start the server with "
                f"--allowed-hosts {_host_argument(host)}, or with --api-key",
            )
        if not self._has_key and scope["method"] not in _SAFE_METHODS and self._is_foreign(headers, host):
            origin = headers.get("origin", "another site")
            raise RequestProblem(
                403,
                f"pages of {origin[:100]!r} may not call this server: start it with --cors-origins, or with "
                "--api-key",
                code="foreign_origin",
            )

    def _is_allowed(self, host: str) -> bool:
        if self._allowed_hosts is None:
            return True
        name = host_name(host)
        if name is None:
            return False
        if is_loopback(name) or name == self._own_host:
            return True
        return any(
            pattern == "*"
            or name == pattern.lower()
            or (pattern.startswith("*.") and name.endswith(pattern[1:].lower()))
            for pattern in self._allowed_hosts
        )

    def _is_foreign(self, headers: Headers, host: str | None) -> bool:
        """Return whether a page of another site sent the request, except a site of ``--cors-origins``."""
        origin = headers.get("origin")
        if "*" in self._origins or origin in self._origins:
            return False
        fetch_site = headers.get("sec-fetch-site")
        if fetch_site is not None:  # pages cannot set or change this header
            return fetch_site not in ("same-origin", "none")
        if origin is None:
            return False
        try:
            return host is None or urlsplit(origin).netloc.lower() != host.lower()
        except ValueError:
            return True


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or a name that always resolves to one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_name(host: str) -> str | None:
    """Return the name or address of a ``Host`` header, in lower case and without the port; None if invalid.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("a@b")
    ('localhost', '::1', None)
    """
    try:
        url = urlsplit(f"//{host}")
        _ = url.port  # raises a ValueError if the port is invalid
    except ValueError:
        return None
    name = url.hostname
    if not name or url.netloc != host or "@" in host or any(letter in host for letter in "/?#\\ \t,"):
        return None
    return name.removesuffix(".")


def _host_argument(host: str) -> str:
    name = host_name(host)
    is_plain = name is not None and len(name) <= 100 and all(c.isalnum() or c in "-._:" for c in name)
    return str(name) if is_plain else "NAME"

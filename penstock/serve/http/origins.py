"""Where requests may come from: the pages of a browser must not use a server that no key protects.

A page of any site can send requests to a server on the same machine (a simple ``POST``), and can make the
browser take the server for its own site (DNS rebinding). The first has a foreign ``Origin``, the second a
foreign ``Host``.
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

_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing; what they answer a foreign page cannot read."""


class CheckSource:
    """Refuses requests of foreign pages, before anything else looks at them.

    Without an API key a request that may change something must have no ``Origin``, the server's own, or one
    of ``--cors-origins``. ``Host`` must be known where ``--allowed-hosts`` is given, and otherwise where the
    server listens at a loopback address without a key: a server that others reach has names that it does
    not know.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._origins = frozenset(config.cors_origins)
        self._has_key = bool(config.api_key)
        self._hosts: Sequence[str] | None = config.allowed_hosts or None
        self._bound = config.host.lower()
        if self._hosts is None and is_loopback(config.host) and not self._has_key:
            self._hosts = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] == "http":
            try:
                self.check(scope)
            except RequestProblem as error:
                problem = problem_of(error)
                record: RequestRecord = scope["state"]["record"]
                record.failed(problem.code, problem.status)
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Looks at the headers of a request.

        Raises:
            RequestProblem: 400, 403 or 421.
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
        host = hosts[0] if hosts else None  # no browser leaves it out
        if host is not None and not self._knows(host):
            raise RequestProblem(
                421,
                f"the host {host[:100]!r} is not known here: start the server with "
                f"--allowed-hosts {_quoted(host)}, or with --api-key",
            )
        if not self._has_key and scope["method"] not in _SAFE and self._is_foreign(headers, host):
            origin = headers.get("origin", "another site")
            raise RequestProblem(
                403,
                f"pages of {origin[:100]!r} may not call this server: start it with --cors-origins, or with "
                "--api-key",
                code="foreign_origin",
            )

    def _knows(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = host_name(host)
        if name is None:
            return False
        if is_loopback(name) or name == self._bound:
            return True
        return any(
            one == "*" or name == one.lower() or (one.startswith("*.") and name.endswith(one[1:].lower()))
            for one in self._hosts
        )

    def _is_foreign(self, headers: Headers, host: str | None) -> bool:
        """Whether a browser sends the request for a page of another site."""
        origin = headers.get("origin")
        if "*" in self._origins or origin in self._origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:  # no page can set or change it
            return site not in ("same-origin", "none")
        if origin is None:
            return False
        try:
            return host is None or urlsplit(origin).netloc.lower() != host.lower()
        except ValueError:
            return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address, or a name that always stands for one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_name(host: str) -> str | None:
    """The name or address in a ``Host`` header, in lower case and without the port; None where it has none.

    >>> host_name("LocalHost:8000"), host_name("[::1]:8000"), host_name("a@b")
    ('localhost', '::1', None)
    """
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises where it is no number
    except ValueError:
        return None
    name = parts.hostname
    if not name or parts.netloc != host or "@" in host or any(letter in host for letter in "/?#\\ \t,"):
        return None
    return name.removesuffix(".")


def _quoted(host: str) -> str:
    name = host_name(host)
    is_plain = name is not None and len(name) <= 100 and all(one.isalnum() or one in "-._:" for one in name)
    return str(name) if is_plain else "NAME"

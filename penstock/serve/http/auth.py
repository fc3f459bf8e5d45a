"""API keys: who may use the server."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from penstock.serve.http.problems import RequestProblem

_CHALLENGE = {"www-authenticate": 'Bearer realm="penstock"'}


class ApiKeys:
    """The keys that open the server; without any it is open to all.

    Comparing takes the same time whatever was sent: digests of equal length are compared, with each key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """Refuses a request without a right key.

        Args:
            headers: raw ones, their names in lower case, as ASGI has them.

        Returns:
            The number of the key, in the order of configuration. None where one key or none is configured:
            then the key tells no client from another.

        Raises:
            RequestProblem: 401.
        """
        if not self._digests:
            return None
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            raise RequestProblem(
                401,
                "an API key is needed: send 'Authorization: Bearer KEY'",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        scheme, _, key = given[0].strip().partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if len(given) > 1 or scheme.lower() != b"bearer" or not any(matches):
            raise RequestProblem(401, "the API key is not one of this server's", headers=_CHALLENGE)
        return matches.index(True) if len(matches) > 1 else None

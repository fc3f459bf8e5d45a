"""Authentication by API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from penstock.serve.http.problems import RequestProblem

_CHALLENGE = {"www-authenticate": 'Bearer realm="penstock"'}


class ApiKeys:
    """The API keys of the server. Without keys, all requests are accepted.

    The time of a check does not depend on the key. A check compares digests of equal length with every key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """Check the API key of a request.

        Args:
            headers: the raw headers from ASGI, with names in lower case.

        Returns:
            The index of the key in the configuration. None if fewer than two keys are configured, because a
            single key does not identify a client.

        Raises:
            RequestProblem: 401; the key is missing or wrong, or the header occurs more than once.
        """
        if not self._digests:
            return None
        headers = list(headers)
        keys = [value for name, value in headers if name == b"authorization"]
        if not keys:  # Anthropic's clients send x-api-key
            keys = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        if not keys:
            raise RequestProblem(
                401,
                "an API key is required: send 'Authorization: Bearer KEY'",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        scheme, _, key = keys[0].strip().partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._digests]
        if len(keys) > 1 or scheme.lower() != b"bearer" or not any(matches):
            raise RequestProblem(401, "the API key is wrong", headers=_CHALLENGE)
        return matches.index(True) if len(matches) > 1 else None

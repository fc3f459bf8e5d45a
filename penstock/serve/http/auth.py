"""Authentication by API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from penstock.serve.http.problems import RequestProblem

_CHALLENGE = {"www-authenticate": 'Bearer realm="penstock"'}


class ApiKeys:
    """The API keys of the server. Without configured keys, `check` accepts all requests.

    The duration of a check does not reveal a key: the check compares the digest of the request's key with the
    digests of all configured keys.
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
            RequestProblem: 401; the key is missing or wrong, its scheme is not Bearer, or its header occurs
                more than once.
        """
        if not self._digests:
            return None
        headers = list(headers)
        credentials = [value for name, value in headers if name == b"authorization"]
        if not credentials:  # Anthropic's clients send x-api-key
            credentials = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        if not credentials:
            raise RequestProblem(
                401,
                "an API key is required: send 'Authorization: Bearer KEY'",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        scheme, _, key = credentials[0].strip().partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._digests]
        if len(credentials) > 1 or scheme.lower() != b"bearer" or not any(matches):
            raise RequestProblem(401, "the API key is wrong", headers=_CHALLENGE)
        return matches.index(True) if len(matches) > 1 else None

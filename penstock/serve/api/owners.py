"""Determines the owner of stored responses, files and batches."""

from __future__ import annotations

from hashlib import sha256

from fastapi import Request

from penstock.serve.services import Services


def request_owner(request: Request) -> str:
    """Return the owner of the objects that a client stores.

    The owner is the hash of the client's API key. It is an empty string if the server has fewer than two
    keys.
    """
    if len(Services.of(request).config.api_key) < 2:
        return ""
    key = request.headers.get("authorization", "").partition(" ")[2] or request.headers.get("x-api-key", "")
    return sha256(key.strip().encode()).hexdigest()

"""The static files of the playground."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_FILE_NAMES = (
    "index.html",
    "style.css",
    "icon.svg",
    "answer.js",
    "api.js",
    "app.js",
    "chart.js",
    "code.js",
    "compare.js",
    "conversations.js",
    "dom.js",
    "images.js",
    "markdown.js",
    "messages.js",
    "metrics.js",
    "pages.js",
    "panel.js",
    "prometheus.js",
    "settings.js",
    "similarity.js",
    "snippets.js",
    "speech.js",
    "tokens.js",
)


def _path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/playground/{name}"


PATHS = frozenset(_path_of(name) for name in _FILE_NAMES)
"""The URL paths of all files."""


@dataclass(frozen=True)
class Asset:
    """The content of a file, its media type and its ETag."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """Return URL path -> file. The first call reads the files."""
    folder = files(__package__)
    return {_path_of(name): _asset(name, folder.joinpath(name).read_bytes()) for name in _FILE_NAMES}


def _asset(name: str, content: bytes) -> Asset:
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]
    return Asset(content, media_type, f'"{blake2b(content, digest_size=12).hexdigest()}"')

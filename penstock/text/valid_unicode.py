"""`valid_unicode`: text that can be encoded as UTF-8."""

from __future__ import annotations


def valid_unicode(text: str) -> str:
    """Return the text with unpaired surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

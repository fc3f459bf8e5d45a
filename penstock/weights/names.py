"""The names of a checkpoint's tensors without what programs that saved it have put before them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WRAPPERS = re.compile(r"(?:_orig_mod|module)\.")  # of torch.compile and of data parallelism
_OUTER = re.compile(r"(?:transformer|language_model)\.(?=model\.|layers\.|embed_tokens\.|norm\.|lm_head\.)")
_INNER = re.compile(r"model\.language_model\.(?:model\.)?")
_OF_THE_BODY = re.compile(r"(?:layers\.\d+|embed_tokens|norm)\.")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Stored name -> plain name, ``model.layers.0...`` and ``lm_head.weight`` for most families.

    Wrappers (``_orig_mod.``, ``module.``) go, a model inside another (``language_model.model.``,
    ``model.language_model.``, ``transformer.model.``) becomes itself, and a body that was saved without its
    head gets the ``model.`` that it would have with one.

    >>> plain_names(["_orig_mod.embed_tokens.weight", "_orig_mod.layers.0.mlp.up_proj.weight"]).values()
    dict_values(['model.embed_tokens.weight', 'model.layers.0.mlp.up_proj.weight'])
    """
    plain = {name: _INNER.sub("model.", _OUTER.sub("", _unwrapped(name), count=1), count=1) for name in names}
    if "embed_tokens.weight" not in plain.values():
        return plain
    return {stored: f"model.{name}" if _OF_THE_BODY.match(name) else name for stored, name in plain.items()}


def _unwrapped(name: str) -> str:
    while match := _WRAPPERS.search(name):
        if match.start() and name[match.start() - 1] != ".":
            break
        name = name[: match.start()] + name[match.end() :]
    return name

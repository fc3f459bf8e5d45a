"""`plain_names`: removes the prefixes that wrapper modules and training programs add to tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WRAPPERS = re.compile(r"(?:_orig_mod|module)\.")  # added by torch.compile and by data parallelism
_OUTER_MODEL_PREFIX = re.compile(
    r"(?:transformer|language_model)\.(?=model\.|layers\.|embed_tokens\.|norm\.|lm_head\.)"
)
_LANGUAGE_MODEL_PREFIX = re.compile(r"model\.language_model\.(?:model\.)?")
_PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\.original$")  # of torch.nn.utils.parametrize
_PART_WITHOUT_HEAD = re.compile(r"(?:layers\.\d+|embed_tokens|norm)\.")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each stored name.

    Plain names of most families are ``model.layers.0...`` and ``lm_head.weight``.
    - Prefixes of wrappers (``_orig_mod.``, ``module.``) are removed.
    - Prefixes of a model inside another model (``language_model.model.``, ``model.language_model.``,
      ``transformer.model.``) become ``model.``.
    - Tensors of a model that was saved without its head get the prefix ``model.``.
    - ``parametrizations.weight.original`` (of ``torch.nn.utils.parametrize``) becomes ``weight``.

    >>> plain_names(["_orig_mod.embed_tokens.weight", "_orig_mod.layers.0.mlp.up_proj.weight"]).values()
    dict_values(['model.embed_tokens.weight', 'model.layers.0.mlp.up_proj.weight'])
    """
    plain = {
        name: _LANGUAGE_MODEL_PREFIX.sub(
            "model.", _OUTER_MODEL_PREFIX.sub("", _remove_wrappers(name), count=1), count=1
        )
        for name in names
    }
    if "embed_tokens.weight" not in plain.values():
        return plain
    return {
        stored_name: f"model.{name}" if _PART_WITHOUT_HEAD.match(name) else name
        for stored_name, name in plain.items()
    }


def _remove_wrappers(name: str) -> str:
    while match := _WRAPPERS.search(name):
        if match.start() and name[match.start() - 1] != ".":
            break
        name = name[: match.start()] + name[match.end() :]
    return _PARAMETRIZED.sub(r".\1", name)

"""Which LoRA adapters are served, and how much room they get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.config.settings import COUNT, FLAG, TEXT, Rule, check_fields, setting


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _pairs(value: Iterable[str]) -> list[tuple[str, str]]:
    return [(name.strip(), path.strip()) for name, _, path in (entry.partition("=") for entry in value)]


def _are_adapters(value: Any) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(entry, str) for entry in value):
        return False
    names = [name for name, _ in _pairs(value)]
    return all(name and path for name, path in _pairs(value)) and len(set(names)) == len(names)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Which LoRA adapters are served, and how much room they get.

    >>> LoRAConfig(lora=("tone=/adapters/tone",)).adapters
    (('tone', '/adapters/tone'),)

    Raises:
        ConfigError: a field has an impossible value.
    """

    lora: tuple[str, ...] = setting(
        (),
        Rule("name=path, each name once", _are_adapters),
        "A LoRA adapter to load at the start, as name=path of a PEFT directory; may be given several times, "
        "in a variable or file with commas. Requests choose it by its name.",
        parse=_split,
    )
    enable_lora: bool = setting(
        False, FLAG, "Make room for LoRA adapters, and let a server load and unload them while it runs."
    )
    lora_dir: str | None = setting(
        None,
        TEXT,
        "The only directory that a running server loads adapters from; by default any that it can read.",
    )
    max_loras: int = setting(
        4, COUNT, "Most adapters that run at once; requests with others wait for their turn."
    )
    max_loaded_loras: int = setting(
        64, COUNT, "Most adapters that are loaded; those that do not run lie in the host's memory."
    )
    max_lora_rank: int = setting(64, COUNT, "Largest rank of an adapter; room is made for this rank.")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_enabled(self) -> bool:
        """Whether there is room for adapters."""
        return self.enable_lora or bool(self.lora)

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Name and path of each adapter to load at the start."""
        return tuple(_pairs(self.lora))

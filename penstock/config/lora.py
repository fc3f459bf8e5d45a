"""`LoRAConfig`: the LoRA adapters to load and their limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.config.settings import COUNT, FLAG, TEXT, Rule, check_fields, setting


def _split_at_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _names_and_paths(entries: Iterable[str]) -> list[tuple[str, str]]:
    """Split each ``name=path`` into name and path. The path of an entry without ``=`` is empty."""
    return [(name.strip(), path.strip()) for name, _, path in (entry.partition("=") for entry in entries)]


def _are_valid_adapters(value: object) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(entry, str) for entry in value):
        return False
    names = [name for name, _ in _names_and_paths(value)]
    return all(name and path for name, path in _names_and_paths(value)) and len(set(names)) == len(names)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The LoRA adapters to load and their limits.

    >>> LoRAConfig(lora=("tone=/adapters/tone",)).adapters
    (('tone', '/adapters/tone'),)

    Raises:
        ConfigError: a field has an invalid value.
    """

    lora: tuple[str, ...] = setting(
        (),
        Rule("name=path, each name once", _are_valid_adapters),
        "LoRA adapter to load at start-up, as name=path of a PEFT directory. For several adapters, repeat "
        "the flag; in an environment variable or a configuration file, commas separate adapters. Requests "
        "select an adapter by its name.",
        parse=_split_at_commas,
    )
    enable_lora: bool = setting(
        False, FLAG, "Reserve memory for LoRA adapters, and let a running server load and unload them."
    )
    lora_dir: str | None = setting(
        None,
        TEXT,
        "Directory that contains the adapters that clients may load into a running server; by default any "
        "readable directory.",
    )
    max_loras: int = setting(
        4, COUNT, "Maximum number of adapters in a batch; requests with further adapters wait."
    )
    max_loaded_loras: int = setting(
        64, COUNT, "Maximum number of loaded adapters, which are kept in host memory."
    )
    max_lora_rank: int = setting(64, COUNT, "Maximum rank of an adapter; memory is reserved for this rank.")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_enabled(self) -> bool:
        """Whether the settings enable LoRA: ``enable_lora`` is set, or ``lora`` lists an adapter."""
        return self.enable_lora or bool(self.lora)

    def with_checkpoint_adapters(self, num_adapters: int, max_rank: int) -> LoRAConfig:
        """Return a configuration whose limits also allow the adapters that the checkpoint contains.

        Args:
            num_adapters: number of adapters in the checkpoint. A batch may use all of them.
            max_rank: the largest rank of the adapters in the checkpoint.
        """
        if not num_adapters:
            return self
        user_limits = (
            self if self.is_enabled else LoRAConfig(max_loras=1, max_loaded_loras=1, max_lora_rank=1)
        )
        num_additional = num_adapters if self.is_enabled else num_adapters - 1
        return replace(
            self,
            max_loras=user_limits.max_loras + num_additional,
            max_loaded_loras=user_limits.max_loaded_loras + num_additional,
            max_lora_rank=max(user_limits.max_lora_rank, max_rank),
        )

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Name and path of each adapter to load at start-up."""
        return tuple(_names_and_paths(self.lora))

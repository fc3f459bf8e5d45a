"""The whole configuration of a pipeline: frozen, checked, and able to say where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.lora import LoRAConfig
from penstock.config.model import ModelConfig
from penstock.config.settings import (
    COUNT,
    FLAG,
    FRACTION,
    NUM_BYTES,
    THREADS,
    ConfigField,
    Rule,
    check_fields,
    fields_of,
    one_of,
    setting,
)
from penstock.config.sources import collect_values
from penstock.config.speculative import SpeculativeConfig
from penstock.config.structured_output import StructuredOutputConfig
from penstock.errors import ConfigError
from penstock.kernels.encodings import ENCODINGS, encoding_named

if TYPE_CHECKING:
    from penstock.pipelines.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """How keys and values of past tokens are kept.

    Raises:
        ConfigError: a field has an impossible value.
    """

    block_size: int | None = setting(
        None,
        Rule("a power of two from 16 to 128", lambda value: value in (16, 32, 64, 128)),
        "Tokens in a block of the KV cache; by default what the kernels prefer, 32 on a CPU.",
        flat="kv_cache_block_size",
    )
    enable_prefix_caching: bool = setting(True, FLAG, "Reuse the blocks of prompts that begin alike.")
    device_memory_utilization: float = setting(
        0.9,
        FRACTION,
        "Share of the free memory that weights, activations and the KV cache may take together.",
    )
    dtype: str | None = setting(
        None,
        one_of("float32", "bfloat16", "float16", "int8"),
        "Element type of the KV cache; by default that of the activations.",
        flat="kv_cache_dtype",
    )
    memory: int | None = setting(
        None, NUM_BYTES, "Bytes for the KV cache; by default as planned.", flat="kv_cache_memory"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How requests are sampled that leave it open.

    Raises:
        ConfigError: a field has an impossible value.
    """

    use_generation_config: bool = setting(
        True,
        FLAG,
        "Take sampling parameters that a request leaves open from the checkpoint's generation_config.json.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Everything that decides how a pipeline runs.

    >>> config = PipelineConfig.from_flat({"model_path": "demo", "kv_cache_block_size": 16})
    >>> config.kv_cache.block_size, config.max_num_steps
    (16, 1)

    Raises:
        ConfigError: a field has an impossible value, or two do not go together.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    max_batch_size: int | None = setting(
        None, COUNT, "Most requests that run at once; by default what the device and the memory allow."
    )
    max_batch_input_tokens: int | None = setting(
        None, COUNT, "Most tokens that one step computes; by default 1024 on a CPU and 8192 on a GPU."
    )
    enable_chunked_prefill: bool = setting(
        True, FLAG, "Compute long prompts in pieces, between the steps of other requests."
    )
    max_num_steps: int | None = setting(
        None,
        COUNT,
        "Most tokens that a request gains before the scheduler looks again; by default what takes a moment.",
    )
    deterministic: bool = setting(
        False,
        FLAG,
        "Bit-equal results alone, batched, chunked and cached; refused in encodings that cannot promise it.",
    )
    num_threads: int | None = setting(
        None, THREADS, "Threads that compute on the CPU; by default one a core."
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Flat name -> where its value was given, of those that were; made by `from_flat`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model.quantization_encoding is not None:
            self.check_determinism()

    def check_determinism(self) -> None:
        """Refuses to be deterministic in an encoding that has no such kernels.

        Raises:
            ConfigError: lists those that have. Where no encoding is given, the checkpoint's is looked up.
        """
        if self.deterministic and not encoding_named(self.model.encoding).is_deterministic:
            known = ", ".join(name for name in ENCODINGS.names if ENCODINGS[name].is_deterministic)
            raise ConfigError(
                "deterministic",
                f"needs quantization_encoding to be one of {known}, is {self.model.encoding!r}",
            )

    @classmethod
    def from_flat(
        cls,
        values: Mapping[str, Any],
        source: str = "argument",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> PipelineConfig:
        """Builds the configuration from flat names, as `config_fields` lists them.

        A value of ``values`` comes before one of ``environment``, that before one of the ``config_file``
        that either of them names, and that before the default. None counts as not given.

        Args:
            values: flat name -> value; ``config_file``, a JSON or TOML file of flat names, is one more.
            source: what gave ``values``, for messages and `describe`. Under ``"flag"`` strings are read as
                text of any type, otherwise types are strict.
            environment: variables of which ``PENSTOCK_<FLAT_NAME>`` are read; an empty one counts as unset.

        Raises:
            ConfigError: unknown name (the nearest is suggested), wrong type, or impossible value.
        """
        return cls.from_given(collect_values(config_fields(), values, source, environment or {}))

    @classmethod
    def from_given(cls, given: Mapping[str, tuple[Any, str]]) -> PipelineConfig:
        """Builds it from flat name -> (converted value, where it was given); other names are left out.

        Raises:
            ConfigError: two values do not go together.
        """
        given = {one.name: given[one.name] for one in config_fields() if one.name in given}
        sections: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in _SECTIONS}}
        for one in config_fields():
            if one.name in given:
                sections[one.section][one.attribute] = given[one.name][0]
        return cls(
            sources={name: where for name, (_, where) in given.items()},
            **{name: section(**sections[name]) for name, section in _SECTIONS.items()},
            **sections[""],
        )

    def describe(self) -> list[tuple[str, Any, str]]:
        """Flat name, value and source of every field, for ``--print-config``."""
        rows = []
        for one in config_fields():
            section = getattr(self, one.section) if one.section else self
            value = getattr(section, one.attribute)
            unnamed = "default" if value == one.default else "argument"
            rows.append((one.name, value, self.sources.get(one.name, unnamed)))
        return rows

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with every open value filled in.

        A value given (not None) comes before the checkpoint's ``generation_config.json``, and that before
        OpenAI's defaults (temperature 1, top_p 1, all tokens). An absent seed is drawn.

        Raises:
            InputError: a given value is out of range.
            CheckpointError: ``generation_config.json`` holds a value that cannot be used.
        """
        from penstock.config.generation import complete_sampling_params

        if not self.sampling.use_generation_config:
            return complete_sampling_params(given, {}, Path())
        path = self.model.checkpoint  # a GGUF file, which says it itself, or a folder
        path = path / "generation_config.json" if path.is_dir() else path
        return complete_sampling_params(given, self.model.generation_config, path)


_SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "sampling": SamplingConfig,
    "lora": LoRAConfig,
    "speculative": SpeculativeConfig,
    "structured_output": StructuredOutputConfig,
}


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """Every setting of `PipelineConfig` and its sections, under flat names that are unique.

    >>> [field.name for field in config_fields() if field.section == "sampling"]
    ['use_generation_config']
    """
    fields = [one for section, cls in _SECTIONS.items() for one in fields_of(cls, section)]
    fields += fields_of(PipelineConfig)
    assert len({one.name for one in fields}) == len(fields)
    return tuple(fields)

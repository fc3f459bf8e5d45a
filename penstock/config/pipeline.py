"""`PipelineConfig`: the complete configuration of a pipeline, with the source of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.lora import LoRAConfig
from penstock.config.model import ModelConfig
from penstock.config.parallel import ParallelConfig
from penstock.config.settings import (
    COUNT,
    FLAG,
    FRACTION,
    NUM_BYTES,
    THREADS,
    WORKERS,
    ConfigField,
    Rule,
    check_fields,
    fields_of,
    one_of,
    setting,
)
from penstock.config.sources import collect_values
from penstock.config.speculative import SpeculativeConfig
from penstock.config.speech import SpeechConfig
from penstock.config.structured_output import StructuredOutputConfig
from penstock.config.vision import VisionConfig
from penstock.errors import ConfigError
from penstock.kernels.encodings import ENCODINGS, encoding_named

if TYPE_CHECKING:
    from penstock.pipelines.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Block size, element type, memory and prefix caching of the KV cache.

    Raises:
        ConfigError: a field has an invalid value.
    """

    block_size: int | None = setting(
        None,
        Rule("a power of two from 16 to 128", lambda value: value in (16, 32, 64, 128)),
        "Tokens per block of the KV cache; by default the preferred size of the kernels, 32 on a CPU.",
        flat_name="kv_cache_block_size",
    )
    enable_prefix_caching: bool = setting(True, FLAG, "Reuse the KV blocks of common prompt prefixes.")
    device_memory_utilization: float = setting(
        0.9,
        FRACTION,
        "Fraction of the free memory for weights, activations and the KV cache together.",
        aliases=("gpu_memory_utilization",),
    )
    dtype: str | None = setting(
        None,
        one_of("float32", "bfloat16", "float16", "int8", "fp8"),
        "Element type of the KV cache; by default the type of the activations. fp8 is E4M3 with the scales "
        "of the checkpoint, or else with one scale for each token and KV head.",
        flat_name="kv_cache_dtype",
    )
    memory: int | None = setting(
        None,
        NUM_BYTES,
        "Size of the KV cache in bytes; by default planned from the free memory.",
        flat_name="kv_cache_memory",
    )
    offload_memory: int | None = setting(
        None,
        NUM_BYTES,
        "Host memory for KV blocks that are evicted from a GPU, in bytes; by default, evicted blocks are "
        "dropped.",
        flat_name="kv_offload_memory",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The source of default sampling parameters.

    Raises:
        ConfigError: a field has an invalid value.
    """

    use_generation_config: bool = setting(
        True,
        FLAG,
        "Use the checkpoint's generation_config.json for sampling parameters that a request does not set.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The complete configuration of a pipeline.

    >>> config = PipelineConfig.from_flat({"model_path": "demo", "kv_cache_block_size": 16})
    >>> config.kv_cache.block_size, config.max_num_steps
    (16, None)

    Raises:
        ConfigError: a field has an invalid value, or two fields contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    speech: SpeechConfig = field(default_factory=SpeechConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_batch_size: int | None = setting(
        None,
        COUNT,
        "Maximum number of requests that run at once; by default as many as the device and the memory allow.",
    )
    max_batch_input_tokens: int | None = setting(
        None, COUNT, "Maximum number of input tokens per step; by default 1024 on a CPU and 8192 on a GPU."
    )
    enable_chunked_prefill: bool = setting(
        True,
        FLAG,
        "Compute long prompts in chunks, so that other requests generate tokens in the meantime.",
    )
    max_num_steps: int | None = setting(
        None,
        COUNT,
        "Maximum number of decode steps per scheduler iteration; by default derived from measured step "
        "times.",
    )
    overlap_steps: bool = setting(
        True,
        FLAG,
        "On a GPU, prepare and launch a step while the previous step runs. Results do not change.",
    )
    deterministic: bool = setting(
        False,
        FLAG,
        "Make the results of a request bit-equal for every batch, division of the prompt into chunks and "
        "state of the prefix cache. Encodings that do not support this setting are refused.",
    )
    num_threads: int | None = setting(
        None,
        THREADS,
        "Number of CPU compute threads per worker; by default OMP_NUM_THREADS, or one per available core.",
    )
    data_parallel_size: int = setting(
        1,
        WORKERS,
        "Number of workers of a server or an AsyncLLM. Each has a copy of the model; the processors or "
        "devices and the memory are divided among them.",
    )
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Flat name -> source of its value, for given values. Set by `from_flat` and `from_given`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model.quantization_encoding is not None:
            self.check_determinism()
        if self.kv_cache.offload_memory and self.model.devices[0].is_host:
            raise ConfigError(
                "kv_offload_memory", "the KV cache of a CPU is in host memory: raise kv_cache_memory instead"
            )
        if self.kv_cache.offload_memory and self.parallel.tensor_parallel_size > 1:
            raise ConfigError("kv_offload_memory", "is not available with tensor_parallel_size above 1")

    def check_determinism(self) -> None:
        """If ``deterministic`` is set, check that the encoding supports deterministic results.

        The check reads the checkpoint if ``quantization_encoding`` is None.

        Raises:
            ConfigError: the encoding does not support deterministic results. The message lists the encodings
                that support them.
        """
        if self.deterministic and not encoding_named(self.model.encoding).is_deterministic:
            encodings = ", ".join(name for name in ENCODINGS.names if ENCODINGS[name].is_deterministic)
            raise ConfigError(
                "deterministic",
                f"needs quantization_encoding to be one of {encodings}, is {self.model.encoding!r}",
            )

    @classmethod
    def from_flat(
        cls,
        values: Mapping[str, object],
        source: str = "argument",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> PipelineConfig:
        """Build the configuration from flat names, as `config_fields` lists them.

        Precedence: ``values``, ``environment``, the configuration file, the defaults. ``config_file`` in
        ``values`` or ``environment`` is the path of the file. None means that a value is not given.

        Args:
            values: flat name -> value; also ``config_file``, a JSON or TOML file of flat names.
            source: the source of ``values``, for messages and `describe`. With ``"flag"``, all strings are
                converted to the types of the fields. Otherwise only fields with their own text form, such as
                sizes and lists, accept strings for values of another type.
            environment: environment variables; ``PENSTOCK_<FLAT_NAME>`` is read if it is not empty.

        Raises:
            ConfigError: a name is unknown (the error suggests the nearest), a value has a wrong type or is
                invalid, two values contradict each other, or the file cannot be read.
        """
        return cls.from_given(collect_values(config_fields(), values, source, environment or {}))

    @classmethod
    def from_given(cls, given_values: Mapping[str, tuple[object, str]]) -> PipelineConfig:
        """Build the configuration from flat name -> (converted value, source). Unknown names are ignored.

        Raises:
            ConfigError: a value is invalid, or two values contradict each other.
        """
        given_values = {
            field.name: given_values[field.name] for field in config_fields() if field.name in given_values
        }
        sections: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in _SECTIONS}}
        for config_field in config_fields():
            if config_field.name in given_values:
                sections[config_field.section][config_field.attribute] = given_values[config_field.name][0]
        return cls(
            sources={name: source for name, (_, source) in given_values.items()},
            **{name: section(**sections[name]) for name, section in _SECTIONS.items()},
            **sections[""],
        )

    def value_of(self, name: str) -> object:
        """Return the value of a setting by its flat name."""
        config_field = next(field for field in config_fields() if field.name == name)
        section = getattr(self, config_field.section) if config_field.section else self
        value: object = getattr(section, config_field.attribute)
        return value

    def describe(self) -> list[tuple[str, object, str]]:
        """Return flat name, value and source of every field, for ``--print-config``."""
        rows = []
        for config_field in config_fields():
            section = getattr(self, config_field.section) if config_field.section else self
            value = getattr(section, config_field.attribute)
            unknown_source = "default" if value == config_field.default else "argument"
            rows.append((config_field.name, value, self.sources.get(config_field.name, unknown_source)))
        return rows

    def default_sampling_params(
        self, *, defaults: Mapping[str, float] | None = None, **given_values: object
    ) -> SamplingParams:
        """Return sampling parameters with defaults for all values that are not given.

        Precedence: given values that are not None, ``generation_config.json`` of the checkpoint (if
        ``use_generation_config`` is set), ``defaults``, OpenAI's defaults (temperature 1, top_p 1, no
        top_k). A missing seed is drawn at random.

        Raises:
            InputError: a given value is out of range.
            CheckpointError: ``generation_config.json`` is malformed or holds an invalid value.
        """
        from penstock.config.generation import complete_sampling_params

        if not self.sampling.use_generation_config:
            return complete_sampling_params(given_values, {}, Path(), defaults)
        path = self.model.checkpoint  # a GGUF file has the values in its metadata
        path = path / "generation_config.json" if path.is_dir() else path
        return complete_sampling_params(given_values, self.model.generation_config, path, defaults)


_SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "sampling": SamplingConfig,
    "lora": LoRAConfig,
    "speculative": SpeculativeConfig,
    "structured_output": StructuredOutputConfig,
    "vision": VisionConfig,
    "speech": SpeechConfig,
    "parallel": ParallelConfig,
}


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return every setting of `PipelineConfig` and its sections. Their flat names are unique.

    >>> [field.name for field in config_fields() if field.section == "sampling"]
    ['use_generation_config']
    """
    fields = [field for section, cls in _SECTIONS.items() for field in fields_of(cls, section)]
    fields += fields_of(PipelineConfig)
    assert len({field.name for field in fields}) == len(fields)
    return tuple(fields)

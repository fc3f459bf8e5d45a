"""The settings of `PipelineConfig` as keyword arguments, for type checkers."""

from __future__ import annotations

from os import PathLike
from typing import TypeAlias, TypedDict

from penstock.driver import DeviceSpec

Path: TypeAlias = str | PathLike[str]


class PipelineOptions(TypedDict, total=False):
    """Keyword arguments of `LLM` except the model: ``config_file``, and the settings by flat name or alias.

    None means that the argument is not given. ``docs/configuration.md`` describes the settings.
    """

    config_file: Path | None
    revision: str | None
    gguf_file: Path | None
    quantization_encoding: str | None
    max_length: int | None
    devices: str | tuple[DeviceSpec, ...] | list[DeviceSpec] | None
    kernels: str | None
    chat_template: Path | None
    special_tokens_in_content: bool | None
    served_model_name: str | None
    task: str | None
    model_impl: str | None
    trust_remote_code: bool | None
    matryoshka_dimensions: tuple[int, ...] | None
    kv_cache_block_size: int | None
    enable_prefix_caching: bool | None
    device_memory_utilization: float | None
    gpu_memory_utilization: float | None
    kv_cache_dtype: str | None
    kv_cache_memory: int | str | None
    kv_offload_memory: int | str | None
    use_generation_config: bool | None
    lora: str | tuple[str, ...] | list[str] | None
    enable_lora: bool | None
    lora_dir: Path | None
    max_loras: int | None
    max_loaded_loras: int | None
    max_lora_rank: int | None
    speculative_method: str | None
    draft_model_path: Path | None
    draft_quantization_encoding: str | None
    num_speculative_tokens: int | None
    adaptive_speculation: bool | None
    ngram_min: int | None
    ngram_max: int | None
    enable_structured_output: bool | None
    grammar_compile_timeout: float | None
    grammar_backend: str | None
    max_grammar_symbols: int | None
    grammar_mask_items: int | None
    grammar_mask_fuel: int | None
    max_grammar_states: int | None
    max_grammar_size: int | None
    grammar_cache_size: int | str | None
    json_whitespace: str | None
    encoder_cache_memory: int | str | None
    max_images_per_request: int | None
    max_image_pixels: int | None
    max_image_bytes: int | str | None
    image_processes: int | None
    image_timeout: float | None
    codec: str | None
    codec_encoding: str | None
    speech_format: str | None
    voice: str | tuple[str, ...] | list[str] | None
    audio_chunk_frames: int | None
    tensor_parallel_size: int | None
    expert_parallel: bool | None
    collective_timeout: float | None
    collective_transport: str | None
    pin_ranks: bool | None
    max_batch_size: int | None
    max_batch_input_tokens: int | None
    enable_chunked_prefill: bool | None
    max_num_steps: int | None
    overlap_steps: bool | None
    deterministic: bool | None
    num_threads: int | None
    data_parallel_size: int | None

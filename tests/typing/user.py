"""User code for a type checker: lazily loaded names have their types."""

from collections.abc import Mapping
from typing import Any, assert_type

from torch import Tensor

import penstock
from penstock import LLM, GenerationOutput, SamplingParams
from penstock.driver import Buffer
from penstock.pipelines import (
    PIPELINE_REGISTRY,
    DecoderModel,
    Detokenizer,
    KVCacheConfig,
    KVCacheMixin,
    MemoryPlan,
    ModelConfig,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    PipelineModel,
    SamplingConfig,
    SpeculativeConfig,
    SupportedArchitecture,
    TextGenerationPipeline,
    TextTokenizer,
    upper_bounded_default,
)
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.pipelines.kv_cache import KVCacheManager, KVCacheSpec, NullKVCache
from penstock.pipelines.weights import Weights


def generate_texts(llm: LLM, prompts: list[str]) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=8))
    assert_type(outputs, list[GenerationOutput])
    return [output.text for output in outputs]


def architecture_names() -> list[str]:
    assert_type(PIPELINE_REGISTRY.architectures, tuple[SupportedArchitecture, ...])
    return [architecture.name for architecture in PIPELINE_REGISTRY.architectures]


def get_max_length(pipeline: TextGenerationPipeline) -> int:
    assert_type(pipeline.memory_plan, MemoryPlan)
    return pipeline.memory_plan.max_length


def run_step(
    pipeline: TextGenerationPipeline, batch: Mapping[str, TextContext]
) -> dict[str, TextGenerationResponse]:
    return pipeline.execute(batch)


def config_sections(
    config: PipelineConfig,
) -> tuple[ModelConfig, KVCacheConfig, SamplingConfig, SpeculativeConfig]:
    return config.model, config.kv_cache, config.sampling, config.speculative


def make_type_errors() -> None:
    LLM("demo").generate("x", SamplingParams(max_new_tokens="8"))  # type: ignore[arg-type]
    upper_bounded_default(8, "16")  # type: ignore[arg-type]
    Weights.open(1)  # type: ignore[arg-type]
    print(penstock.LLLM)  # type: ignore[attr-defined]
    print(penstock.driver.nothing)  # type: ignore[attr-defined]
    print(penstock.pipelines.PipelineModels)  # type: ignore[attr-defined]
    print(penstock.pipelines.kv_cache.Cache)  # type: ignore[attr-defined]
    print(penstock.pipelines.weights.weights)  # type: ignore[attr-defined]


def count_elements(data: Buffer) -> int:
    assert_type(data, Tensor)
    return data.numel()


USED_NAMES: tuple[Any, ...] = (
    DecoderModel,
    Detokenizer,
    KVCacheMixin,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    TextTokenizer,
    KVCacheManager,
    KVCacheSpec,
    NullKVCache,
)

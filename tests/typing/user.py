"""A user's code for a type checker: the names that load lazily have their types."""

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


def texts(llm: LLM, prompts: list[str]) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=8))
    assert_type(outputs, list[GenerationOutput])
    return [output.text for output in outputs]


def names() -> list[str]:
    assert_type(PIPELINE_REGISTRY.architectures, tuple[SupportedArchitecture, ...])
    return [architecture.name for architecture in PIPELINE_REGISTRY.architectures]


def plan(pipeline: TextGenerationPipeline) -> int:
    assert_type(pipeline.memory_plan, MemoryPlan)
    return pipeline.memory_plan.max_length


def step(
    pipeline: TextGenerationPipeline, batch: Mapping[str, TextContext]
) -> dict[str, TextGenerationResponse]:
    return pipeline.execute(batch)


def parts(config: PipelineConfig) -> tuple[ModelConfig, KVCacheConfig, SamplingConfig, SpeculativeConfig]:
    return config.model, config.kv_cache, config.sampling, config.speculative


def refused() -> None:
    LLM("demo").generate("x", SamplingParams(max_new_tokens="8"))  # type: ignore[arg-type]
    upper_bounded_default(8, "16")  # type: ignore[arg-type]
    Weights.open(1)  # type: ignore[arg-type]
    print(penstock.LLLM)  # type: ignore[attr-defined]
    print(penstock.driver.nothing)  # type: ignore[attr-defined]
    print(penstock.pipelines.PipelineModels)  # type: ignore[attr-defined]
    print(penstock.pipelines.kv_cache.Cache)  # type: ignore[attr-defined]
    print(penstock.pipelines.weights.weights)  # type: ignore[attr-defined]


def buffer(data: Buffer) -> int:
    assert_type(data, Tensor)
    return data.numel()


USED: tuple[Any, ...] = (
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

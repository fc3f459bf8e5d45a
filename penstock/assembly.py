"""From a configuration to the parts that run it: what `LLM` drives itself and the server's worker is given.

A composition root, like ``llm.py`` and ``cli``: here alone tokenizer, model, cache and scheduler meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipelines.config import PipelineConfig
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.pipelines.tokenizer import TextTokenizer
from penstock.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.pipelines.pipeline import TextGenerationPipeline


def load_tokenizer(config: PipelineConfig) -> TextTokenizer:
    """The tokenizer of the configured model; it loads no torch. Its ``max_length`` is the checkpoint's own
    until whoever has planned the memory sets it.

    Raises:
        CheckpointError: the tokenizer is missing or damaged.
        ConfigError: the chat template that is configured is not a template.
    """
    return TextTokenizer(config.model.checkpoint, chat_template=config.model.chat_template)


def load_pipeline(config: PipelineConfig, tokenizer: TextTokenizer) -> TextGenerationPipeline:
    """The pipeline of the configured model, its weights loaded and its memory shared out.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
    """
    from penstock.pipelines.pipeline import TextGenerationPipeline
    from penstock.pipelines.registry import PIPELINE_REGISTRY

    architecture = PIPELINE_REGISTRY.retrieve_architecture(
        config.model.huggingface_config, config.model.checkpoint, encoding=config.model.encoding
    )
    eos = tokenizer.eos if tokenizer.eos_token_ids else None
    return TextGenerationPipeline(config, architecture.load_pipeline_model(), eos)


def load_scheduler(
    config: PipelineConfig, pipeline: TextGenerationPipeline
) -> Scheduler[TextContext, TextGenerationResponse]:
    """The scheduler that drives a pipeline within the limits that its memory was planned for."""
    plan = pipeline.memory_plan
    return Scheduler(
        pipeline,
        max_batch_size=plan.max_batch_size,
        max_batch_input_tokens=plan.max_batch_input_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )

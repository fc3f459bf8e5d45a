"""The factory of the text-generation pipeline: the model, its drafts and its grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.grammar import GrammarCompiler
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength, NGramProposer
from penstock.pipelines.speculative.draft_model import DraftModelProposer, draft_config, share_memory
from penstock.pipelines.text_generation import PipelineModel, TextGenerationPipeline

if TYPE_CHECKING:
    from penstock.pipelines.core import TextContext
    from penstock.pipelines.tasks import PipelineRequirements


def create_text_generation(required: PipelineRequirements) -> TextGenerationPipeline:
    """Load the model and return its pipeline.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
    """
    config, tokenizer = required.config, required.tokenizer
    eos = tokenizer.eos if tokenizer.eos_token_ids else None
    pipeline = create_text_pipeline(required, TextGenerationPipeline, eos)
    if config.structured_output.enable:
        pipeline.grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, config=config.structured_output)
    return pipeline


def create_text_pipeline(
    required: PipelineRequirements,
    kind: Callable[..., TextGenerationPipeline],
    eos: int | None,
    session: InferenceSession | None = None,
) -> TextGenerationPipeline:
    """Load the model and return a pipeline of class ``kind``, with the configured speculation.

    Args:
        required: the parts of the pipeline.
        kind: the class of the pipeline, or a function with its parameters.
        eos: end-of-sequence id of contexts without such ids.
        session: devices and kernels; by default a new one.
    """
    model = required.architecture.load_pipeline_model()
    session = session or required.open_session()
    if required.config.speculative.method is None:
        return kind(required.config, model, eos, session=session)
    return _create_speculative(required, kind, model, eos, session)


def _create_speculative(
    required: PipelineRequirements,
    kind: Callable[..., TextGenerationPipeline],
    model: type[PipelineModel[TextContext]],
    eos: int | None,
    session: InferenceSession,
) -> TextGenerationPipeline:
    """Return a pipeline with drafts from a draft model or from n-grams of the text."""
    config, prefaulted = required.config, required.prefaulted
    speculative = config.speculative
    policy = AdaptiveDraftLength if speculative.adaptive_speculation else FixedDraftLength
    draft_lengths = policy(speculative.num_speculative_tokens)
    if speculative.method == "ngram":
        proposer = NGramProposer(speculative.ngram_min, speculative.ngram_max)
        return kind(config, model, eos, proposer=proposer, draft_lengths=draft_lengths, session=session)
    draft_model = draft_config(config).model
    draft = required.registry.retrieve_architecture(
        draft_model.huggingface_config, draft_model.checkpoint, encoding=draft_model.encoding
    ).load_pipeline_model()
    # Read before the free memory of the host, which a thread still moves to this buffer.
    free_memory = prefaulted.num_idle
    free_memory += InferenceSession.free_memory_of(load_devices(config.model.devices))
    config, drafting = share_memory(config, model, draft, free_memory=free_memory)
    pipeline = kind(config, model, eos, draft_lengths=draft_lengths, session=session)
    vocabulary = config.model.huggingface_config.vocabulary_size
    pipeline.proposer = DraftModelProposer(drafting, draft, pipeline.session, vocabulary)
    return pipeline

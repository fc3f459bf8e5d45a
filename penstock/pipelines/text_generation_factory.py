"""The factory of text-generation pipelines, with drafts and grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.errors import ConfigError
from penstock.grammar import GrammarCompiler
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength, NGramProposer
from penstock.pipelines.speculative.draft_model import DraftModelProposer, draft_config, share_memory
from penstock.pipelines.text_generation import PipelineModel, TextGenerationPipeline

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.pipelines.core import TextContext
    from penstock.pipelines.tasks import PipelineRequirements


def create_text_generation(requirements: PipelineRequirements) -> TextGenerationPipeline:
    """Load the model and return its pipeline.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
    """
    config, tokenizer = requirements.config, requirements.tokenizer
    eos_token_id = tokenizer.eos if tokenizer.eos_token_ids else None
    pipeline = create_text_pipeline(requirements, TextGenerationPipeline, eos_token_id)
    if config.structured_output.enable:
        pipeline.grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, config=config.structured_output)
    return pipeline


def create_text_pipeline(
    requirements: PipelineRequirements,
    pipeline_class: Callable[..., TextGenerationPipeline],
    eos_token_id: int | None,
    session: InferenceSession | None = None,
) -> TextGenerationPipeline:
    """Load the model and return a pipeline of class ``pipeline_class``, with the configured speculation.

    Args:
        requirements: the arguments of the pipeline factory.
        pipeline_class: the class of the pipeline, or a function with the same parameters.
        eos_token_id: see `TextGenerationPipeline`.
        session: devices and kernels; by default a new one.
    """
    model = requirements.architecture.load_pipeline_model()
    session = session or requirements.open_session()
    if requirements.config.speculative.method is None:
        return pipeline_class(requirements.config, model, eos_token_id, session=session)
    return _create_speculative(requirements, pipeline_class, model, eos_token_id, session)


def _create_speculative(
    requirements: PipelineRequirements,
    pipeline_class: Callable[..., TextGenerationPipeline],
    model: type[PipelineModel[TextContext]],
    eos_token_id: int | None,
    session: InferenceSession,
) -> TextGenerationPipeline:
    """Return a pipeline that drafts with a draft model or with n-grams.

    Raises:
        ConfigError: a model has recurrent states, or the draft model does not fit the target.
        InsufficientMemoryError: both models together do not fit.
    """
    config, prefaulted = requirements.config, requirements.prefaulted
    _refuse_recurrent_states(config, model, "speculative_method")
    speculative = config.speculative
    policy = AdaptiveDraftLength if speculative.adaptive_speculation else FixedDraftLength
    draft_lengths = policy(speculative.num_speculative_tokens)
    if speculative.method == "ngram":
        proposer = NGramProposer(speculative.ngram_min, speculative.ngram_max)
        return pipeline_class(
            config, model, eos_token_id, proposer=proposer, draft_lengths=draft_lengths, session=session
        )
    draft_settings = draft_config(config).model
    draft_model = requirements.registry.retrieve_architecture(
        draft_settings.huggingface_config, draft_settings.checkpoint, encoding=draft_settings.encoding
    ).load_pipeline_model()
    _refuse_recurrent_states(draft_config(config), draft_model, "draft_model_path")
    # Read before the free memory: a thread turns free memory into idle prefaulted memory. In the other order,
    # memory that the thread turns between the two calls would be counted twice.
    free_memory = prefaulted.num_idle
    free_memory += InferenceSession.free_memory_of(load_devices(config.model.devices))
    target_config, planned_draft_config = share_memory(config, model, draft_model, free_memory=free_memory)
    pipeline = pipeline_class(
        target_config, model, eos_token_id, draft_lengths=draft_lengths, session=session
    )
    vocab_size = target_config.model.huggingface_config.vocabulary_size
    pipeline.proposer = DraftModelProposer(planned_draft_config, draft_model, pipeline.session, vocab_size)
    return pipeline


def _refuse_recurrent_states(
    config: PipelineConfig, model: type[PipelineModel[TextContext]], field: str
) -> None:
    """Refuse a model with recurrent states, from which rejected drafts cannot be removed.

    Raises:
        ConfigError: the model has such states. The error names the configuration field ``field``.
    """
    spec = model.kv_spec(config, config.model.huggingface_config)
    if spec is not None and spec.states is not None:
        raise ConfigError(
            field,
            f"{config.model.name} has recurrent states, from which rejected drafts cannot be removed: "
            "remove this setting",
        )

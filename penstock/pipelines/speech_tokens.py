"""`SpeechTokenGenerationPipeline`: a text pipeline whose tokens are codes of an audio codec."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import PipelineConfig
from penstock.engine import InferenceSession
from penstock.errors import InputError
from penstock.pipelines.core import PipelineTask, TextGenerationResponse, TextGenerationStatus, TTSContext
from penstock.pipelines.text_generation import BatchHandle, PipelineModel, TextGenerationPipeline
from penstock.pipelines.text_generation_factory import create_text_pipeline
from penstock.text.speech_format import SpeechCodes

if TYPE_CHECKING:
    from penstock.pipelines.tasks import PipelineRequirements


def create_speech_tokens(
    requirements: PipelineRequirements, session: InferenceSession | None = None
) -> SpeechTokenGenerationPipeline:
    """Load the model and return its pipeline.

    Args:
        requirements: the arguments of the pipeline factory; the tokenizer is a `SpeechTokenizer`.
        session: devices and kernels; by default a new one.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: weights and the smallest permitted KV cache do not fit.
    """
    speech_format = requirements.tokenizer.speech_format
    pipeline = create_text_pipeline(
        requirements,
        partial(SpeechTokenGenerationPipeline, codes=speech_format.codes),
        speech_format.end_token_ids[0],
        session,
    )
    assert isinstance(pipeline, SpeechTokenGenerationPipeline)
    return pipeline


class SpeechTokenGenerationPipeline(TextGenerationPipeline):
    """Generates tokens and adds the codes that they represent to ``TTSContext.speech_tokens``.

    Args:
        pipeline_config: the configuration.
        pipeline_model: the class of the model; the pipeline creates the instance.
        eos_token_id: see `TextGenerationPipeline`.
        codes: the mapping from tokens to codes.
        **options: see `TextGenerationPipeline`.
    """

    task = PipelineTask.SPEECH_TOKEN_GENERATION
    context_types = (TTSContext,)

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[Any]],
        eos_token_id: int | None,
        *,
        codes: SpeechCodes,
        **options: Any,
    ) -> None:
        super().__init__(pipeline_config, pipeline_model, eos_token_id, **options)
        self.codes = codes

    def collect(self, handle: BatchHandle) -> dict[str, TextGenerationResponse]:
        """Return the new tokens of a launched batch, after updating its contexts with tokens and codes."""
        responses = super().collect(handle)
        for request_id in responses:
            context = handle.batch[request_id]
            assert isinstance(context, TTSContext)
            add_speech_codes(context, self.codes)
        return responses

    def next_speech_token(
        self, batch: Mapping[str, TTSContext], num_steps: int, tokens_to_generate: Mapping[str, int]
    ) -> dict[str, TextGenerationResponse]:
        """Generate speech tokens until each context has ended, has failed, or has reached its limit.

        Args:
            batch: the contexts, by request id. Contexts that have ended or failed are skipped.
            num_steps: maximum number of new tokens of any context.
            tokens_to_generate: maximum number of new tokens of each context, by request id.

        Returns:
            The new tokens of each context that has generated at least one token.

        Raises:
            InputError: ``tokens_to_generate`` has no entry for a context.
            PenstockError: see `execute`.
        """
        missing_ids = [request_id for request_id in batch if request_id not in tokens_to_generate]
        if missing_ids:
            raise InputError(f"tokens_to_generate has no number for the request {missing_ids[0]}")
        num_tokens_left = {request_id: min(tokens_to_generate[request_id], num_steps) for request_id in batch}
        responses: dict[str, TextGenerationResponse] = {}
        while True:
            generating_contexts = {
                request_id: context
                for request_id, context in batch.items()
                if num_tokens_left[request_id] > 0
                and not context.generation_status.is_done
                and request_id not in self.failures
            }
            if not generating_contexts:
                return responses
            old_lengths = {
                request_id: len(context.generated_tokens)
                for request_id, context in generating_contexts.items()
            }
            max_steps = min(num_tokens_left[request_id] for request_id in generating_contexts)
            for request_id, response in self.execute(generating_contexts, max_steps).items():
                num_tokens_left[request_id] -= (
                    len(generating_contexts[request_id].generated_tokens) - old_lengths[request_id]
                )
                total_response = responses.setdefault(
                    request_id, TextGenerationResponse([], response.final_status)
                )
                total_response.tokens.extend(response.tokens)
                total_response.update_status(response.final_status)


def add_speech_codes(context: TTSContext, codes: SpeechCodes) -> None:
    """Append the whole frames of newly generated tokens to ``context.speech_tokens``.

    Tokens of an incomplete last frame stay unparsed. If generation has ended, they are dropped instead.
    """
    status = context.generation_status
    tokens = context.generated_tokens[context.num_parsed_tokens :]
    if status is TextGenerationStatus.END_OF_SEQUENCE:
        tokens = tokens[:-1]  # the last token is an end-of-sequence token
    frames, num_parsed, num_dropped = codes.parse(tokens)
    if status.is_done:
        num_dropped += len(tokens) - num_parsed
        num_parsed = len(tokens)
    if num_parsed:
        context.mark_parsed(num_parsed, num_dropped)
    if len(frames):
        context.update_speech_tokens(frames)

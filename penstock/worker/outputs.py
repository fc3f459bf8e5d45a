"""Converts pipeline outputs to messages. Only this module distinguishes the types of outputs."""

from __future__ import annotations

from penstock.pipelines.core import (
    AudioGenerationResponse,
    EmbeddingsResponse,
    LogProbabilities,
    TextContext,
    TextGenerationResponse,
)
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.worker.messages import (
    AudioResult,
    EmbeddingsResult,
    PackedLogProbabilities,
    RequestResult,
    TextResult,
)


def result_message(context: TextContext, output: PipelineOutput) -> RequestResult | None:
    """Return the message for an output; None for an empty output that is not final, as after a prompt chunk.

    Raises:
        TypeError: the output is not of one of the known types.
    """
    request_id = context.request_id
    match output:
        case TextGenerationResponse():
            return _text_result(context, output)
        case EmbeddingsResponse():
            return EmbeddingsResult(request_id, output)
        case AudioGenerationResponse():
            if output.audio is None and not output.is_done:
                return None
            return AudioResult(request_id, output.final_status, output.audio, len(context.generated_tokens))
    raise TypeError(
        f"a pipeline returned {type(output).__name__}, which is not an output type: return a "
        "TextGenerationResponse, EmbeddingsResponse or AudioGenerationResponse"
    )


def _text_result(context: TextContext, output: TextGenerationResponse) -> TextResult | None:
    if not output.tokens and not output.is_done:
        return None
    tokens = [int(token.next_token) for token in output.tokens]
    result = TextResult(context.request_id, tokens, output.final_status)
    if context.log_probabilities:
        result.log_probabilities = [_pack_rows(token.log_probabilities) for token in output.tokens]
    if output.is_done:
        result.prompt_log_probabilities = _pack_rows(context.prompt_log_probabilities)
    return result


def _pack_rows(rows: LogProbabilities | None) -> PackedLogProbabilities | None:
    return None if rows is None else PackedLogProbabilities.pack(rows)

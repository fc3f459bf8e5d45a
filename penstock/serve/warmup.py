"""Warm-up requests, so that the first requests of clients do not wait for one-time work of the engine.

The server waits for `warm_up_model` before it is ready, but not for `warm_up_grammars`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from penstock.errors import RequestFailedError
from penstock.pipelines.core import (
    AudioGenerationRequest,
    EmbeddingsGenerationRequest,
    Grammar,
    PipelineTask,
    RequestContext,
    SamplingParams,
    TextContext,
    TokenGeneratorRequest,
)
from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer
from penstock.text.speech_tokenizer import SpeechTokenizer
from penstock.text.tokenizer import TextTokenizer
from penstock.worker.engine_client import EngineClient

_NUM_NEW_TOKENS = 3
_INPUT_LENGTHS = (2, 64)
"""Lengths of the warm-up inputs of an embeddings model in tokens, before truncation to its maximum length."""


async def warm_up_model(worker: EngineClient, tokenizer: TextTokenizer, task: PipelineTask) -> None:
    """Run short requests: text generation, embeddings or speech. Does nothing for other tasks.

    Raises:
        PenstockError: a request failed. `warm_up_speech` ignores a `RequestFailedError`.
    """
    if task is PipelineTask.TEXT_GENERATION:
        await warm_up_text_generation(worker, tokenizer)
    elif isinstance(tokenizer, EmbeddingsTokenizer):
        await warm_up_embeddings(worker, tokenizer)
    elif isinstance(tokenizer, SpeechTokenizer):
        await warm_up_speech(worker, tokenizer)


async def warm_up_text_generation(worker: EngineClient, tokenizer: TextTokenizer) -> None:
    """Run three short requests: one greedy, one sampled, one with a penalty and log probabilities.

    Raises:
        PenstockError: a request failed. Requests of users would fail too.
    """
    await asyncio.gather(*(_run(worker, context) for context in _warm_up_contexts(tokenizer)))


def _warm_up_contexts(tokenizer: TextTokenizer) -> Iterator[TextContext]:
    warm_up_params = {
        "greedy": (SamplingParams(max_new_tokens=_NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True), 0),
        "sampled": (
            SamplingParams(
                max_new_tokens=_NUM_NEW_TOKENS, temperature=1.0, top_p=0.9, top_k=50, ignore_eos=True
            ),
            0,
        ),
        "reported": (
            SamplingParams(
                max_new_tokens=_NUM_NEW_TOKENS, temperature=1.0, frequency_penalty=0.5, ignore_eos=True
            ),
            1,
        ),
    }
    for name, (params, num_logprobs) in warm_up_params.items():
        request = TokenGeneratorRequest(
            f"warm-up-{name}", 0, "", prompt=[0], sampling_params=params, logprobs=num_logprobs
        )
        yield tokenizer.build_context(request)


async def warm_up_embeddings(worker: EngineClient, tokenizer: EmbeddingsTokenizer) -> None:
    """Embed an input of 2 tokens and an input of 64 tokens, or of the maximum length if that is less.

    Raises:
        PenstockError: an input failed. Requests of users would fail too.
    """
    for length in _INPUT_LENGTHS:
        request = EmbeddingsGenerationRequest(id=f"warm-up-{length}", input=[0] * length, truncate=True)
        await _run(worker, tokenizer.build_embeddings_context(request))


async def warm_up_speech(worker: EngineClient, tokenizer: SpeechTokenizer) -> None:
    """Generate up to two frames of speech.

    Raises:
        PenstockError: the request failed with an error other than `RequestFailedError`. Requests of users
            would fail too.
    """
    speech_format = tokenizer.speech_format
    frame_token_ids = speech_format.codes.token_ids([0] * speech_format.codes.codes_per_frame)
    params = SamplingParams(
        max_new_tokens=2 * len(frame_token_ids), ignore_eos=True, allowed_token_ids=frame_token_ids
    )
    request = AudioGenerationRequest(
        "warm-up", 0, "", prompt=frame_token_ids, sampling_params=params, streaming=True
    )
    with suppress(RequestFailedError):  # a model with random weights may generate no whole frame
        await _run(worker, tokenizer.build_speech_context(request))


async def warm_up_grammars(worker: EngineClient, tokenizer: TextTokenizer) -> None:
    """Run a short request with a grammar.

    Raises:
        PenstockError: the request failed.
    """
    params = SamplingParams(max_new_tokens=_NUM_NEW_TOKENS)  # the grammar may end the output earlier
    grammar = Grammar("json_object")
    request = TokenGeneratorRequest(
        "warm-up-grammar", 0, "", prompt=[0], sampling_params=params, grammar=grammar
    )
    await _run(worker, tokenizer.build_context(request))


async def _run(worker: EngineClient, context: RequestContext) -> None:
    async for _ in worker.submit(context):
        pass

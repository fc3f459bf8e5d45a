"""The routes ``/completion`` and ``/infill``, which are compatible with llama.cpp's server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.serve.api.choice_decoder import ChoiceDelta
from penstock.serve.api.completions import CompletionRequest
from penstock.serve.api.generation import GenerationRun, run_in_pool
from penstock.serve.api.llama_cpp.llama_cpp_schema import InfillBody, LlamaCppBody, LlamaCppCompletionBody
from penstock.serve.api.text_generation import answer_request, checked_body, record_logged_fields
from penstock.serve.api.translation import Translation
from penstock.serve.api.usage import Usage
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.http.sse import OpenAIStream, event
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["llama.cpp"])

CLIENT_FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "structured_outputs.json": "json_schema",
    "structured_outputs.grammar": "grammar",
    "structured_outputs": "json_schema",
    "suffix": "input_suffix",
}
"""Field of a completion request -> field of llama.cpp's request, for error messages."""
_FIELDS_SHARED_WITH_CHAT = (
    "temperature top_k top_p min_p stop stream presence_penalty frequency_penalty ignore_eos".split()
)
"""Fields with the same name and meaning in a completion request and in llama.cpp's request."""


@router.post(
    "/completion", **route_options(LlamaCppCompletionBody, "The completion, or its events with `stream`.")
)
async def llama_cpp_completion(request: Request) -> Response:
    """Continue a prompt. Request and response have llama.cpp's format."""
    return await _answer(request, LlamaCppCompletionBody)


@router.post(
    "/infill", **route_options(InfillBody, "The text between prefix and suffix, or its events with `stream`.")
)
async def llama_cpp_infill(request: Request) -> Response:
    """Fill in the middle of a text. Request and response have llama.cpp's format."""
    return await _answer(request, InfillBody)


class LlamaCppBuilder(OpenAIStream):
    """Builds the JSON object or the stream events of one response.

    Args:
        body: the request.
        completion: the completion request to which `body` was translated.
        record: has the times of arrival, of admission and of the first token.
    """

    def __init__(self, body: LlamaCppBody, completion: CompletionRequest, record: RequestRecord) -> None:
        self._body = body
        self._completion = completion
        self._choice = completion.job.choices[0]
        self._record = record

    def whole_response(self, outputs: Sequence[ChoiceDelta], usage: Usage) -> Iterable[bytes]:
        """Yield the JSON of a response that is not streamed."""
        output = outputs[0]
        yield msgspec.json.encode(self._final_object(output.content, output.token_ids, usage))

    def begin(self) -> bytes:
        """Return no events, because this API has none before the first delta."""
        return b""

    def events(self, index: int, delta: ChoiceDelta, usage: Usage | None = None) -> Iterable[bytes]:
        """Return the event of a delta, or no event if the delta has no text."""
        if not delta.content:
            return ()
        tokens = delta.token_ids if self._body.return_tokens else []
        return (event({"index": 0, "content": delta.content, "tokens": tokens, "stop": False}),)

    def end(self, usage: Usage) -> bytes:
        """Return the last event, which has the usage and the timings."""
        return event(self._final_object("", [], usage))

    def _final_object(self, text: str, token_ids: list[int], usage: Usage) -> dict[str, object]:
        choice, context = self._choice, self._completion.job.contexts[0]
        stop_string = choice.stop_match
        stop_type = "limit" if choice.finish_reason == "length" else "eos" if stop_string is None else "word"
        return {
            "index": 0,
            "content": text,
            "tokens": token_ids if self._body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._completion.body.model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": stop_string or "",
            "prompt": context.prompt if isinstance(context.prompt, str) else "",
            "generation_settings": {"seed": context.sampling_params.seed},
            "timings": self._timings(usage),
        }

    def _timings(self, usage: Usage) -> dict[str, object]:
        record, end = self._record, time.perf_counter()
        first_token_at = record.first_token_at or end
        prefill_seconds, decode_seconds = (
            first_token_at - (record.admitted_at or record.received_at),
            end - first_token_at,
        )
        num_prompt_tokens, num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return {
            "prompt_n": num_prompt_tokens,
            "prompt_ms": prefill_seconds * 1000,
            "prompt_per_second": num_prompt_tokens / max(prefill_seconds, 1e-9),
            "predicted_n": num_output_tokens,
            "predicted_ms": decode_seconds * 1000,
            "predicted_per_second": num_output_tokens / max(decode_seconds, 1e-9),
        }


async def _answer(request: Request, body_type: type[LlamaCppBody]) -> Response:
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()

    def prepare() -> tuple[LlamaCppBody, CompletionRequest]:
        body = checked_body(services, body_type, raw)
        translation = Translation(_completion_fields(services, body), (), (), CLIENT_FIELD_NAMES)
        with translation.with_client_fields():
            return body, CompletionRequest.of(services, translation.translated_body)

    body, completion = await run_in_pool(request, prepare)
    record_logged_fields(completion.body, record, completion.job.contexts[0])
    builder = LlamaCppBuilder(body, completion, record)
    run = GenerationRun(services, record, completion.job)
    return await answer_request(request, services, run, builder, stream=bool(body.stream))


def _completion_fields(services: Services, body: LlamaCppBody) -> dict[str, object]:
    """Return the fields of the completion request to which a request is translated.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    fields: dict[str, object] = {
        name: getattr(body, name)
        for name in ("model", *_FIELDS_SHARED_WITH_CHAT)
        if getattr(body, name) is not None
    }
    if body.seed is not None and body.seed != -1:
        fields["seed"] = body.seed
    if body.repeat_penalty is not None:
        fields["repetition_penalty"] = body.repeat_penalty
    if body.json_schema is not None and body.grammar:
        raise RequestProblem(400, "json_schema and grammar both set a format: send only one", param="grammar")
    if body.json_schema is not None:
        fields["structured_outputs"] = {"json": body.json_schema}
    elif body.grammar:
        fields["structured_outputs"] = {"grammar": body.grammar}
    limit = -1 if body.n_predict is None else body.n_predict
    fields["max_tokens"] = services.worker.info.max_length if limit < 0 else limit
    if isinstance(body, InfillBody):
        if not body.input_suffix:
            raise RequestProblem(400, "input_suffix is empty: use /completion", param="input_suffix")
        extra_text = "".join(f"{file.filename}\n{file.text}\n" for file in body.input_extra or ())
        fields |= {
            "prompt": extra_text + body.input_prefix + (body.prompt or ""),
            "suffix": body.input_suffix,
        }
    elif isinstance(body, LlamaCppCompletionBody):
        fields["prompt"] = body.prompt
    return fields

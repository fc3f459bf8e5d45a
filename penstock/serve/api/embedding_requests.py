"""Functions that the routes of embeddings models share: they read requests and run the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, Unpack, cast
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from fastapi import Request

from penstock.errors import PromptTooLongError, UnsupportedFeatureError
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsGenerationRequest,
    EmbeddingsOutput,
    EmbeddingsResponse,
    check_dimensions,
)
from penstock.pipelines.core.embeddings import EmbeddingsFields, EmbeddingsOptions
from penstock.serve.api.embedding_run import EmbeddingRun
from penstock.serve.api.embedding_schemas import EncodingBody, TextsOrIds, VectorBody
from penstock.serve.api.generation import cancel_on_disconnect, run_in_pool
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.api.text_generation import checked_body
from penstock.serve.http.problems import RequestProblem
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer

Body = TypeVar("Body", bound=EncodingBody)


@dataclass(frozen=True)
class ModelInput:
    """One input of the model."""

    name: str
    """The request field of the input, such as ``input[3]``, for error messages."""
    fields: EmbeddingsFields
    """The fields of the input's `EmbeddingsGenerationRequest`."""


@dataclass(frozen=True)
class EncodedInputs:
    """The model's outputs for all inputs of a request."""

    responses: list[EmbeddingsResponse]
    num_tokens: int
    """The total number of tokens of the inputs."""

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's ``usage`` object."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """Read and validate the body of a request. Write its model and user into the request record.

    Raises:
        RequestProblem: 400; the message names the invalid field.
        UnknownModelError: the server has no model or adapter with the requested name.
    """
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    body = await run_in_pool(request, lambda: checked_body(services, body_type, raw))
    record.model, record.user = body.model, body.user
    requested_adapter(services, body.model)
    return body


async def encode_inputs(
    request: Request, body: EncodingBody, inputs: Callable[[], Sequence[ModelInput]]
) -> EncodedInputs:
    """Run all inputs of a request and return the model's outputs. Cancel them if the client disconnects.

    Args:
        request: a request whose body has been read.
        body: the validated body.
        inputs: function that returns the inputs. It runs in a thread pool.

    Raises:
        RequestProblem: an input is invalid or has failed; ``param`` names the field. 503 if a time limit is
            exceeded.
        PenstockError: the worker is not ready, or the queue is full.
        ClientDisconnect: the client disconnected.
    """
    services, record = Services.of(request), RequestRecord.of(request)
    contexts, names = await run_in_pool(request, lambda: _contexts(services, body, inputs()))
    record.details["inputs"] = len(contexts)
    run = EmbeddingRun(services, record, contexts, names)
    responses = await cancel_on_disconnect(request, run, run.responses)
    return EncodedInputs(responses, run.num_tokens)


def input_list(value: TextsOrIds, field: str = "input") -> list[tuple[str, str | list[int]]]:
    """Return the name and the value of each input.

    The name of a text or of a list of token ids is `field`. In a list of inputs, names are like ``input[3]``.

    Raises:
        RequestProblem: 400; the list is empty.
    """
    if isinstance(value, str):
        return [(field, value)]
    if not value:
        raise RequestProblem(400, f"{field} is an empty list: send at least one input", param=field)
    if isinstance(value[0], int):
        return [(field, value)]
    return [(f"{field}[{i}]", cast("str | list[int]", element)) for i, element in enumerate(value)]


def check_num_inputs(services: Services, num_inputs: int, field: str) -> None:
    """Raise if a request has more inputs than ``--max-inputs-per-request``.

    Raises:
        RequestProblem: 400; the message has both numbers.
    """
    limit = services.config.max_inputs_per_request
    if num_inputs > limit:
        raise RequestProblem(
            400,
            f"{field} has {num_inputs} entries, but a request may have {limit} (--max-inputs-per-request): "
            "send several requests",
            param=field,
        )


def check_outputs(services: Services, outputs: Sequence[str], hint: str = "") -> None:
    """Raise if the model does not compute a requested output. Does nothing if the worker reports no outputs.

    Args:
        services: the objects that routes use.
        outputs: the requested outputs.
        hint: the end of the error message, which says what the client can do instead.

    Raises:
        UnsupportedFeatureError: the message names the outputs of the model.
    """
    model_outputs = services.worker.info.outputs
    missing_outputs = [name for name in outputs if name not in model_outputs]
    if model_outputs and missing_outputs:
        raise UnsupportedFeatureError(
            f"the output {missing_outputs[0]}", f"this model computes {', '.join(model_outputs)}{hint}"
        )


def vector_inputs(
    services: Services,
    body: VectorBody,
    outputs: Sequence[EmbeddingsOutput] | None,
    **extra_options: Unpack[EmbeddingsOptions],
) -> list[ModelInput]:
    """Return the model inputs of a request for embeddings or pooling.

    Args:
        services: the objects that routes use.
        body: the validated request body.
        outputs: the outputs to compute; None or empty for the model's first output.
        **extra_options: further options; they take precedence over the options of the body.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    inputs = input_list(body.input)
    check_num_inputs(services, len(inputs), "input")
    if body.input_type is not None and body.prompt_name is not None:
        raise RequestProblem(
            400, "input_type and prompt_name both select a prompt: send only one of them", param="input_type"
        )
    embedding_size = services.worker.info.embedding_size
    if body.dimensions is not None and body.pooling is None and embedding_size:
        with map_input_errors("dimensions"):
            check_dimensions(
                body.dimensions, embedding_size, services.pipeline_config.model.trained_dimensions
            )
    prompt_name = body.prompt_name
    if body.input_type is not None:
        prompt_name = embeddings_tokenizer(services).layout.prompt_for(
            "query" if body.input_type == "query" else "document"
        )
    if body.input_type is not None and body.task is not None:
        raise RequestProblem(
            400, "input_type and task both select a task: send only one of them", param="input_type"
        )
    shared_options: EmbeddingsOptions = {
        "pooling": body.pooling,
        "dimensions": body.dimensions,
        "normalize": body.normalize,
        "prompt_name": prompt_name,
        "task": body.task,
        **extra_options,
    }
    output_names = tuple(outputs) if outputs else None
    return [
        ModelInput(name, {**shared_options, "input": value, "outputs": output_names, "adapter": None})
        for name, value in inputs
    ]


def embeddings_tokenizer(services: Services) -> EmbeddingsTokenizer:
    """Return the tokenizer of an embeddings model."""
    return cast(EmbeddingsTokenizer, services.tokenizer)


def response_id(prefix: str) -> str:
    """Return a new random id that begins with `prefix`, such as ``rerank-1f0c...``."""
    return f"{prefix}-{uuid4().hex}"


def nested_list(array: npt.NDArray[np.number]) -> list[object]:
    """Return an array as nested lists of Python numbers."""
    values: list[object] = array.tolist()
    return values


def _contexts(
    services: Services, body: EncodingBody, inputs: Sequence[ModelInput]
) -> tuple[list[EmbeddingsContext], list[str]]:
    """Return the contexts of all inputs and their names. Blocks: call it in a thread pool."""
    adapter = requested_adapter(services, body.model)
    is_single = len(inputs) == 1
    requests: list[EmbeddingsGenerationRequest] = []
    for model_input in inputs:
        fields: EmbeddingsFields = {
            **model_input.fields,
            "truncate": body.truncates,
            "max_tokens": body.max_tokens,
            "adapter": adapter,
            "priority": body.priority or 0,
        }
        with _input_errors(model_input.name, is_single=is_single):
            requests.append(EmbeddingsGenerationRequest(id=uuid4().hex, model_name=body.model, **fields))
    # One call for all requests, because the tokenizer encodes a batch of texts faster than single texts.
    new_contexts = embeddings_tokenizer(services).build_embeddings_contexts(requests)
    contexts: list[EmbeddingsContext] = []
    for model_input in inputs:
        with _input_errors(model_input.name, is_single=is_single):
            contexts.append(next(new_contexts))
    return contexts, [model_input.name for model_input in inputs]


@contextmanager
def _input_errors(name: str, *, is_single: bool) -> Iterator[None]:
    """Convert an `InputError` of the ``with`` block to a `RequestProblem` that names the input."""
    try:
        with map_input_errors(name):
            yield
    except RequestProblem as problem:
        message = problem.message
        if isinstance(cause := problem.__cause__, PromptTooLongError):
            count = str(cause.num_tokens) if cause.is_exact else f"more than {cause.num_tokens}"
            message = (
                f"{name} has {count} tokens, but the maximum length is {cause.max_length} tokens: "
                "shorten the input, or send truncate: true to cut it"
            )
        elif not is_single:
            message = f"{name}: {message}"
        raise RequestProblem(
            problem.status_code, message, param=problem.param, code=problem.code
        ) from problem.__cause__

"""What crosses between the serving side and the worker that runs the model.

    serving side                                             worker
         | -- Submit, Cancel, LoadAdapter, UnloadAdapter, Ping, Stop --> |
         | <-- Started | StartFailed, StepResults, CallResult, Pong ---- |

A context crosses once, in `Submit`; after that its id stands for it. All that a step brought for all requests
is one message. Messages that come often are arrays rather than maps, without names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock import errors
from penstock.errors import PenstockError, RequestFailedError
from penstock.pipelines.core import (
    EmbeddingsResponse,
    LogProbabilities,
    PipelineTask,
    RequestContext,
    TextGenerationStatus,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from penstock.scheduler.isolation import FAULT

# -- Both ways -------------------------------------------------------------------------------------------


class ErrorRecord(msgspec.Struct, frozen=True):
    """A `PenstockError` on its way to another process."""

    name: str
    """Of its class in `penstock.errors`."""
    message: str
    fields: dict[str, Any] = {}
    """Its attributes, as far as they are plain."""

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """The record of an error.

        What is no `PenstockError` becomes a `RequestFailedError` that does not say what went wrong: that may
        not be the user's business, and is in the log.
        """
        if not isinstance(error, PenstockError):
            error = RequestFailedError(FAULT)
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        return cls(name, str(error), {key: value for key, value in vars(error).items() if _is_plain(value)})

    def error(self) -> PenstockError:
        """The error again: same class, message and attributes."""
        kind = _ERRORS[self.name]
        error = kind.__new__(kind, self.message)  # not __init__, which makes a message of other arguments
        error.__dict__.update(self.fields)
        return error


_ERRORS: dict[str, type[PenstockError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, str | int | float) for one in value)
    return value is None or isinstance(value, str | int | float)


# -- To the worker ---------------------------------------------------------------------------------------


class Submit(msgspec.Struct, tag=True):
    """A new request."""

    context: RequestContext


class Cancel(msgspec.Struct, tag=True):
    """Nobody wants the rest of a request any more."""

    request_id: str


class LoadAdapter(msgspec.Struct, tag=True):
    """Load a LoRA adapter; answered by a `CallResult`."""

    call_id: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Forget a LoRA adapter; answered by a `CallResult`."""

    call_id: int
    name: str


class Ping(msgspec.Struct, tag=True):
    """Are you there? Answered by a `Pong`, between two steps."""


class Stop(msgspec.Struct, tag=True):
    """End, after the step that runs now."""


Command: TypeAlias = Submit | Cancel | LoadAdapter | UnloadAdapter | Ping | Stop


# -- From the worker -------------------------------------------------------------------------------------


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker has loaded, and what it can take."""

    max_length: int
    """Most tokens of a request, prompt and output together."""
    max_batch_size: int
    max_batch_input_tokens: int
    num_blocks: int
    """Blocks of the KV cache, of the group of layers that has the fewest."""
    block_size: int
    """Tokens a block."""
    vocab_size: int
    adapters: list[tuple[str, str]] = []
    """Name and path of each LoRA adapter that was loaded at the start."""
    startup: list[tuple[str, float]] = []
    """The phases of the start, in order, and their seconds."""
    memory: list[tuple[str, str]] = []
    """The rows of the memory plan, for people to read."""
    isa: str = ""
    """The instruction set or back end of the kernels."""
    pid: int = 0
    lora_enabled: bool = False
    grammars_enabled: bool = False
    task: PipelineTask = PipelineTask.TEXT_GENERATION
    """The task of the requests that the worker takes."""


class WorkerStats(msgspec.Struct, array_like=True, kw_only=True):
    """Counts of the worker since its start, and how it stands now."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    """Blocks of the KV cache; those in use and those cached are among them."""
    num_used_blocks: int = 0
    """Blocks that some request holds."""
    num_cached_blocks: int = 0
    """Blocks that nobody holds but whose content is known: a hit, or the next to be handed out."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    """Prompt tokens of all requests admitted so far."""
    num_prefix_hit_tokens: int = 0
    """Those of them that were found in the prefix cache."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests whose prompt is computed."""
    num_generated_tokens: int = 0
    """Tokens sampled and kept, end-of-sequence tokens included."""
    num_steps: int = 0
    """Steps that computed something."""
    step_seconds: float = 0.0
    """All the time that those took."""
    last_batch_size: int = 0
    last_batch_tokens: int = 0
    """Tokens that the last such step computed; of several forwards, in the first."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_verified_steps: int = 0
    """Forwards of one request that had drafts to verify."""


class Started(msgspec.Struct, array_like=True, tag=True):
    """The model is loaded: requests can be served."""

    info: WorkerInfo


class StartFailed(msgspec.Struct, array_like=True, tag=True):
    """The model cannot be loaded; the worker ends."""

    error: ErrorRecord


class PackedLogProbabilities(msgspec.Struct, array_like=True):
    """`LogProbabilities` whose rows of top tokens are msgpack.

    The serving side decodes a row when it writes the answer. To decode all rows of a long prompt at once
    would block its event loop.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[msgspec.Raw]
    """Of each position a ``dict[int, float]``."""

    @classmethod
    def of(cls, rows: LogProbabilities) -> PackedLogProbabilities:
        """Return the packed form."""
        encode = msgspec.msgpack.encode
        return cls(
            rows.token_log_probabilities, [msgspec.Raw(encode(row)) for row in rows.top_log_probabilities]
        )


class TextResult(msgspec.Struct, array_like=True, tag=0):
    """The new tokens of one request."""

    request_id: str
    tokens: list[int]
    status: TextGenerationStatus = TextGenerationStatus.ACTIVE
    log_probabilities: list[PackedLogProbabilities | None] | None = None
    """One entry a token; None if no token has any."""
    prompt_log_probabilities: PackedLogProbabilities | None = None
    """Those of an echoed prompt whose first new token ended the output; else the first token has them."""


class EmbeddingsResult(msgspec.Struct, array_like=True, tag=1):
    """The vectors or scores of one request, which they end."""

    request_id: str
    response: EmbeddingsResponse

    @property
    def status(self) -> TextGenerationStatus:
        """Always the end: one call computes the whole response."""
        return TextGenerationStatus.END_OF_SEQUENCE


class AudioResult(msgspec.Struct, array_like=True, tag=2):
    """The new audio of one request."""

    request_id: str
    status: TextGenerationStatus = TextGenerationStatus.ACTIVE
    audio: npt.NDArray[Any] | None = None
    """The samples that follow those of the last result."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        same = (self.request_id, self.status) == (other.request_id, other.status)
        if self.audio is None or other.audio is None:
            return same and self.audio is other.audio
        return same and np.array_equal(self.audio, other.audio)


RequestResult: TypeAlias = TextResult | EmbeddingsResult | AudioResult
"""What a step computed for one request; the tag says which."""


class Admission(msgspec.Struct, array_like=True):
    """A request was given its slot."""

    request_id: str
    num_cached_tokens: int


class Failure(msgspec.Struct, array_like=True):
    """A request ended with an error."""

    request_id: str
    error: ErrorRecord


class StepResults(msgspec.Struct, array_like=True, tag=True):
    """All that happened to requests in a step and since the one before."""

    stats: WorkerStats
    admissions: list[Admission] = []
    results: list[RequestResult] = []
    failures: list[Failure] = []
    cancelled: list[str] = []
    """Requests that ended as a `Cancel` asked."""


class CallResult(msgspec.Struct, array_like=True, tag=True):
    """The answer to a command that has a ``call_id``."""

    call_id: int
    error: ErrorRecord | None = None


class Pong(msgspec.Struct, array_like=True, tag=True):
    """The worker is between two steps, or has nothing to do."""

    stats: WorkerStats


WorkerMessage: TypeAlias = Started | StartFailed | StepResults | CallResult | Pong


# -- As bytes --------------------------------------------------------------------------------------------


def command_encoder() -> Callable[[Command], bytes]:
    """What the serving side writes with. One a thread, as all of these."""
    return msgpack_numpy_encoder()


def command_decoder() -> Callable[[bytes], Command]:
    """What the worker reads with."""
    return msgpack_numpy_decoder(Command)


def report_encoder() -> Callable[[WorkerMessage], bytes]:
    """What the worker writes with."""
    return msgpack_numpy_encoder()


def report_decoder() -> Callable[[bytes], WorkerMessage]:
    """What the serving side reads with."""
    return msgpack_numpy_decoder(WorkerMessage)

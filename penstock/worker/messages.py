"""The messages between the server and the worker.

    server                                                     worker
         | -- Submit, Cancel, LoadAdapter, UnloadAdapter, ---------------> |
         |    Control, WatchCache, Ping, Stop                              |
         | <-- Started | StartFailed, StepResults, CallResult, Pong ------ |

A context is sent once, in `Submit`; later messages contain only its request id. One `StepResults` carries the
results of a step for all requests. The worker's messages are encoded as arrays without field names, but
nested types such as `WorkerInfo` have field names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

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
    VoicePrompt,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from penstock.pipelines.core.cache_events import CacheEvent
from penstock.pipelines.core.serialization import Frame, frames_decoder, frames_encoder
from penstock.scheduler.isolation import FAULT_MESSAGE

# -- Errors ----------------------------------------------------------------------------------------------


class ErrorRecord(msgspec.Struct, frozen=True):
    """A `PenstockError` as a message."""

    name: str
    """The name of the error's class, or of its nearest base class in `penstock.errors`."""
    message: str
    # Any, because with `object` msgspec would pass the values to the decoder of arrays
    fields: dict[str, Any] = {}
    """The attributes of the error that are numbers, texts, None, or lists of numbers and texts."""

    @classmethod
    def from_error(cls, error: BaseException) -> ErrorRecord:
        """Return the record of an error.

        Exceptions other than `PenstockError` become a `RequestFailedError` without details, because details
        may be confidential. The worker logs these exceptions.
        """
        if not isinstance(error, PenstockError):
            error = RequestFailedError(FAULT_MESSAGE)
        name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
        return cls(name, str(error), {key: value for key, value in vars(error).items() if _is_plain(value)})

    def error(self) -> PenstockError:
        """Return the error with the recorded class, message and attributes."""
        error_class = _ERRORS[self.name]
        # The error is created without __init__, whose parameters differ between the classes.
        error = error_class.__new__(error_class, self.message)
        error.__dict__.update(self.fields)
        return error


_ERRORS: dict[str, type[PenstockError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, PenstockError)
}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str | int | float) for item in value)
    return value is None or isinstance(value, str | int | float)


# -- To the worker ---------------------------------------------------------------------------------------

ControlAction: TypeAlias = Literal["reset_prefix_cache", "discard_cache", "start_profile", "stop_profile"]
"""``reset_prefix_cache`` removes all cached prefixes. ``discard_cache`` returns the memory of the KV cache to
the system, and fails if a request is running or waiting. ``stop_profile`` writes the profile into the
configured folder.
"""


class Submit(msgspec.Struct, tag=True):
    """Submit a new request."""

    context: RequestContext


class Cancel(msgspec.Struct, tag=True):
    """Cancel a request."""

    request_id: str


class LoadAdapter(msgspec.Struct, tag=True):
    """Load a LoRA adapter. The worker answers with a `CallResult`."""

    call_id: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Unload a LoRA adapter. The worker answers with a `CallResult`."""

    call_id: int
    name: str


class Control(msgspec.Struct, tag=True):
    """Change the state of the worker between two steps. The worker answers with a `CallResult`."""

    call_id: int
    action: ControlAction


class WatchCache(msgspec.Struct, tag=True):
    """Report the events of the prefix cache from now on, in `StepResults`."""


class Ping(msgspec.Struct, tag=True):
    """Check that the worker responds. The worker answers with a `Pong` between two steps."""


class Stop(msgspec.Struct, tag=True):
    """End the worker after the current step."""


Command: TypeAlias = Submit | Cancel | LoadAdapter | UnloadAdapter | Control | WatchCache | Ping | Stop


# -- From the worker -------------------------------------------------------------------------------------


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model and the limits of the worker."""

    max_length: int
    """Maximum number of tokens of a request, prompt and output together."""
    max_batch_size: int
    max_batch_input_tokens: int
    num_blocks: int
    """Blocks of the KV cache, in the layer group with the fewest blocks."""
    block_size: int
    """Tokens per block."""
    prefix_limits: list[int] | None = None
    """See `KVCache.prefix_limits`. None if prefix caching is disabled."""
    vocab_size: int
    adapters: list[tuple[str, str]] = []
    """Name and path of each LoRA adapter loaded at the start."""
    startup: list[tuple[str, float]] = []
    """Name and seconds of each phase of the start, in order."""
    memory: list[tuple[str, str]] = []
    """The rows of the memory plan, formatted as text."""
    isa: str = ""
    """The instruction set or back end of the kernels."""
    pid: int = 0
    lora_enabled: bool = False
    grammars_enabled: bool = False
    task: PipelineTask = PipelineTask.TEXT_GENERATION
    """The task that the model is loaded for."""
    outputs: list[str] = []
    """The outputs that a request may choose; the first is the default. Empty for tasks with one output."""
    embedding_size: int = 0
    """The length of a dense embedding; 0 for other tasks."""
    sample_rate: int = 0
    """Samples per second of generated audio; 0 for other tasks."""
    voices: list[VoicePrompt] = []
    """The configured voices to imitate."""


class WorkerStats(msgspec.Struct, array_like=True, kw_only=True):
    """Statistics of a worker: totals since the start of the worker, and current values."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    """The number of blocks of the KV cache, including used and cached blocks."""
    num_used_blocks: int = 0
    """Blocks that at least one request uses."""
    num_cached_blocks: int = 0
    """Free blocks with a known prefix, which requests can reuse until the blocks are allocated again."""
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    """Prompt tokens of all requests admitted so far, except requests that echo log probabilities."""
    num_prefix_hit_tokens: int = 0
    """The tokens of `num_prefix_query_tokens` that were found in the prefix cache."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests admitted so far."""
    num_generated_tokens: int = 0
    """Sampled tokens that were appended to contexts, including end-of-sequence tokens."""
    num_steps: int = 0
    """Steps with at least one context."""
    step_seconds: float = 0.0
    """Total duration of the steps counted by `num_steps`, in seconds."""
    last_batch_size: int = 0
    """Requests of the last step."""
    last_batch_tokens: int = 0
    """Input tokens of the last step, in its first forward."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_verified_steps: int = 0
    """Verifications of drafts, counted per request and forward."""
    num_encoded_images: int = 0
    num_cached_images: int = 0
    """Images whose encoder outputs were in the encoder cache, counted per step."""


class Started(msgspec.Struct, array_like=True, tag=True):
    """The model is loaded and the worker accepts requests."""

    info: WorkerInfo


class StartFailed(msgspec.Struct, array_like=True, tag=True):
    """The model cannot be loaded. The worker ends."""

    error: ErrorRecord


class PackedLogProbabilities(msgspec.Struct, array_like=True):
    """`LogProbabilities` with msgpack-encoded rows of top tokens.

    The server decodes a row only when it writes the row into the response, because decoding all rows of a
    long prompt at once would block the server's event loop.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[msgspec.Raw]
    """One encoded ``dict[int, float]`` per position."""

    @classmethod
    def pack(cls, unpacked: LogProbabilities) -> PackedLogProbabilities:
        """Return log probabilities with encoded rows of top tokens."""
        encode = msgspec.msgpack.encode
        encoded_rows = [msgspec.Raw(encode(row)) for row in unpacked.top_log_probabilities]
        return cls(unpacked.token_log_probabilities, encoded_rows)

    def unpack(self) -> LogProbabilities:
        """Return the log probabilities with decoded rows of top tokens."""
        decode = msgspec.msgpack.Decoder(dict[int, float]).decode
        return LogProbabilities(self.token_log_probabilities, [*map(decode, self.top_log_probabilities)])


class TextResult(msgspec.Struct, array_like=True, tag=0):
    """The new tokens of one request."""

    request_id: str
    tokens: list[int]
    status: TextGenerationStatus = TextGenerationStatus.ACTIVE
    log_probabilities: list[PackedLogProbabilities | None] | None = None
    """One entry per token; None if no token has log probabilities."""
    prompt_log_probabilities: PackedLogProbabilities | None = None
    """Log probabilities of an echoed prompt if the result has no token; otherwise the first entry of
    ``log_probabilities`` includes them.
    """


class EmbeddingsResult(msgspec.Struct, array_like=True, tag=1):
    """The vectors or scores of one request. This result ends the request."""

    request_id: str
    response: EmbeddingsResponse

    @property
    def status(self) -> TextGenerationStatus:
        """The status is always final, because one step computes the whole response."""
        return TextGenerationStatus.END_OF_SEQUENCE


class AudioResult(msgspec.Struct, array_like=True, tag=2):
    """The new audio of one request."""

    request_id: str
    status: TextGenerationStatus = TextGenerationStatus.ACTIVE
    audio: npt.NDArray[np.floating] | None = None
    """The new samples since the previous result; None if there are none."""
    num_tokens: int = 0
    """Number of tokens that the request has generated so far."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        has_same_progress = (self.request_id, self.status, self.num_tokens) == (
            other.request_id,
            other.status,
            other.num_tokens,
        )
        if self.audio is None or other.audio is None:
            return has_same_progress and self.audio is other.audio
        return has_same_progress and np.array_equal(self.audio, other.audio)


RequestResult: TypeAlias = TextResult | EmbeddingsResult | AudioResult
"""The result of a step for one request. The tag selects the type."""


class Admission(msgspec.Struct, array_like=True):
    """The scheduler admitted a request."""

    request_id: str
    num_cached_tokens: int


class Failure(msgspec.Struct, array_like=True):
    """A request ended with an error."""

    request_id: str
    error: ErrorRecord


class StepResults(msgspec.Struct, array_like=True, tag=True):
    """The results of a step, and all other changes of requests since the previous `StepResults`."""

    stats: WorkerStats
    admissions: list[Admission] = []
    results: list[RequestResult] = []
    failures: list[Failure] = []
    cancelled: list[str] = []
    """Requests that a `Cancel` ended."""
    cache_events: list[CacheEvent] = []
    """Events of the prefix cache since the previous message; empty before a `WatchCache`."""


class CallResult(msgspec.Struct, array_like=True, tag=True):
    """The answer to a command with a ``call_id``."""

    call_id: int
    error: ErrorRecord | None = None


class Pong(msgspec.Struct, array_like=True, tag=True):
    """The answer to a `Ping`."""

    stats: WorkerStats


WorkerMessage: TypeAlias = Started | StartFailed | StepResults | CallResult | Pong


# -- Encoding --------------------------------------------------------------------------------------------


def command_encoder() -> Callable[[Command], list[Frame]]:
    """Return the server's encoder of commands. A command becomes a msgpack body and a frame per large array.

    Each thread needs its own encoders and decoders.
    """
    return frames_encoder()


def command_decoder() -> Callable[[Sequence[bytes]], Command]:
    """Return the worker's decoder of the frames of a command."""
    return frames_decoder(Command)


def report_encoder() -> Callable[[WorkerMessage], bytes]:
    """Return the worker's encoder of reports."""
    return msgpack_numpy_encoder()


def report_decoder() -> Callable[[bytes], WorkerMessage]:
    """Return the server's decoder of reports."""
    return msgpack_numpy_decoder(WorkerMessage)

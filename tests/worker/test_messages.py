"""Messages between server and worker: encoding and decoding, errors, and sizes."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from support.kv_contexts import text_context

from penstock import errors
from penstock.errors import PenstockError, RequestFailedError
from penstock.pipelines.core import (
    EmbeddingsResponse,
    ImageMetadata,
    LogProbabilities,
    TextAndVisionContext,
    TextGenerationStatus,
)
from penstock.pipelines.core.context_types import CONTEXT_TYPES
from penstock.worker import messages
from penstock.worker.messages import (
    Admission,
    AudioResult,
    CallResult,
    Cancel,
    EmbeddingsResult,
    ErrorRecord,
    Failure,
    LoadAdapter,
    PackedLogProbabilities,
    Ping,
    Pong,
    Started,
    StartFailed,
    StepResults,
    Stop,
    Submit,
    TextResult,
    UnloadAdapter,
    WorkerInfo,
    WorkerStats,
)

ERRORS = [
    errors.PenstockError("anything"),
    errors.InputError("temperature must be at least 0, was -1"),
    errors.PromptTooLongError(200, 128),
    errors.TaskMismatchError("LLM.generate", "text-generation", "embeddings-generation"),
    errors.UnknownModelError("gpt", ["demo", "other"]),
    errors.UnknownParameterError("SamplingParams", "max_tokens", "did you mean max_new_tokens?"),
    errors.UnsupportedFeatureError("images", "this model reads text"),
    errors.UnsupportedSchemaError("$ref", "#/properties/a", "is recursive"),
    errors.RequestFailedError("the request ended"),
    errors.UnavailableError("not now", retry_after=7),
    errors.OverloadedError("too many", retry_after=3),
    errors.RankFailedError("rank 1 has ended", retry_after=5),
    errors.ConfigError("max_length", "must be at least 1"),
    errors.CheckpointError("/models/x", "is damaged"),
    errors.CheckpointNotFoundError("/models/x", "does not exist"),
    errors.WeightsError("/models/x", "misses 3 tensors"),
    errors.UnknownArchitectureError("/models/x", "lama", ["llama"]),
    errors.UnsupportedTaskError("/models/x", "bert", "text-generation", ["embeddings-generation"]),
    errors.InsufficientMemoryError("too little memory", needed=10, available=5),
    errors.InsufficientBlocksError(3, 1, 8),
    errors.InsufficientStatesError(4),
    errors.ForkedProcessError(12, 34),
    errors.MissingDependencyError("pyzmq", "serve", "penstock serve"),
]
FAILURE = ErrorRecord("InputError", "no")
INFO = WorkerInfo(
    max_length=1,
    max_batch_size=2,
    max_batch_input_tokens=3,
    num_blocks=4,
    block_size=5,
    vocab_size=6,
    adapters=[("a", "/a")],
    startup=[("model", 0.5)],
    memory=[("weights", "1 GiB")],
)
LOG_PROBABILITIES = LogProbabilities([-0.5], [{3: -0.5, 4: -1.25}])
PACKED_LOG_PROBABILITIES = PackedLogProbabilities.pack(LOG_PROBABILITIES)
DONE = TextGenerationStatus.MAXIMUM_LENGTH


def test_the_tested_errors_include_every_error_class() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type)}
    assert {type(error) for error in ERRORS} == {cls for cls in classes if issubclass(cls, PenstockError)}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_class_message_and_attributes(error: PenstockError) -> None:
    error.add_note("in prompt 2")
    encoded_report = messages.report_encoder()(StartFailed(ErrorRecord.from_error(error)))
    decoded_report = messages.report_decoder()(encoded_report)
    assert isinstance(decoded_report, StartFailed)
    decoded_error = decoded_report.error.error()
    assert type(decoded_error) is type(error)
    assert str(decoded_error) == str(error)
    assert vars(decoded_error) == vars(error)


def test_details_of_internal_errors_and_attributes_that_are_objects_are_not_sent() -> None:
    decoded_error = ErrorRecord.from_error(ZeroDivisionError("/secret/path")).error()
    assert type(decoded_error) is RequestFailedError
    assert "secret" not in str(decoded_error)
    error = errors.InputError("no")
    error.context = object()  # type: ignore[attr-defined]
    assert ErrorRecord.from_error(error) == ErrorRecord("InputError", "no")


def test_an_error_of_an_unknown_class_becomes_its_nearest_known_base_class() -> None:
    class UnknownError(errors.ConfigError):
        pass

    decoded_error = ErrorRecord.from_error(UnknownError("odd", "is not even")).error()
    assert type(decoded_error) is errors.ConfigError
    assert str(decoded_error) == "odd: is not even"


@pytest.mark.parametrize(
    "command",
    [
        Submit(text_context([1, 2, 3], priority=2, cache_salt="s", eos_token_ids={7})),
        *(
            Submit(context_type(prompt="", max_length=9, tokens=np.array([1])))
            for context_type in CONTEXT_TYPES
        ),
        Cancel("r"),
        LoadAdapter(1, "name", "/path"),
        UnloadAdapter(2, "name"),
        Ping(),
        Stop(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_commands_are_equal_after_decoding(command: messages.Command) -> None:
    decoded_command = messages.command_decoder()(messages.command_encoder()(command))
    assert type(decoded_command) is type(command)
    assert decoded_command == command
    if isinstance(command, Submit):
        assert type(decoded_command.context) is type(command.context)


def test_large_arrays_are_sent_once_in_a_separate_frame() -> None:
    pixels = np.random.default_rng(0).normal(size=(3, 200, 100)).astype(np.float32)
    images = [ImageMetadata(start_idx=start, end_idx=start + 2, pixel_values=pixels) for start in (0, 2)]
    context = TextAndVisionContext(
        prompt="", max_length=9, tokens=np.array([5] * 4), images=images, vision_token_ids=[5]
    )
    frames = messages.command_encoder()(Submit(context))
    assert len(frames) == 2
    assert len(frames[0]) < 2000
    assert bytes(frames[1]) == pixels.tobytes()
    decode = messages.command_decoder()
    decoded_command = decode([bytes(frame) for frame in frames])
    assert decoded_command.context == context
    assert decoded_command.context.images[0].pixel_values is decoded_command.context.pixel_values[1]
    assert decoded_command.context.images[0].pixel_values.flags.writeable
    assert isinstance(decode([bytes(messages.command_encoder()(Ping())[0])]), Ping)


@pytest.mark.parametrize(
    "report",
    [
        Started(INFO),
        StartFailed(FAILURE),
        StepResults(WorkerStats(num_steps=1)),
        StepResults(
            WorkerStats(step_seconds=0.25),
            [Admission("a", 64)],
            [
                TextResult("a", [1, 2]),
                TextResult("b", [3], DONE, [PACKED_LOG_PROBABILITIES], PACKED_LOG_PROBABILITIES),
                EmbeddingsResult("e", EmbeddingsResponse(np.arange(3.0), scores=np.ones(2, np.float32))),
                AudioResult("f", audio=np.arange(4, dtype=np.float32)),
                AudioResult("g", DONE),
            ],
            [Failure("c", FAILURE)],
            ["d"],
        ),
        CallResult(3),
        CallResult(4, FAILURE),
        Pong(WorkerStats(num_waiting=4)),
    ],
    ids=lambda report: type(report).__name__,
)
def test_reports_are_equal_after_decoding(report: messages.WorkerMessage) -> None:
    decoded_report = messages.report_decoder()(messages.report_encoder()(report))
    assert type(decoded_report) is type(report)
    assert decoded_report == report


def test_the_result_of_one_token_takes_fewer_than_56_bytes() -> None:
    def encoded_size(num_requests: int) -> int:
        results = [TextResult(f"{number:032x}", [1000]) for number in range(num_requests)]
        return len(messages.report_encoder()(StepResults(WorkerStats(), [], results)))

    assert (encoded_size(33) - encoded_size(1)) / 32 < 56
    assert msgspec.msgpack.decode(messages.report_encoder()(Pong(WorkerStats())))[0] == "Pong"


def test_importing_the_worker_process_loads_no_torch() -> None:
    script = "import penstock.worker.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

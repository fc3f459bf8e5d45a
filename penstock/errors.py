"""The exceptions of Penstock, with their attributes.

    PenstockError
    ├── InputError (ValueError)
    │   ├── PromptTooLongError                 num_tokens, max_length, is_exact
    │   ├── TaskMismatchError                  task, served
    │   ├── UnknownModelError                  model, known
    │   ├── UnknownParameterError (TypeError)  parameter
    │   └── UnsupportedFeatureError            feature
    │       └── UnsupportedSchemaError         keyword, where
    ├── RequestFailedError
    ├── UnavailableError                       retry_after
    │   ├── OverloadedError
    │   └── RankFailedError
    ├── ConfigError (ValueError)               field
    ├── CheckpointError (ValueError)           path
    │   ├── CheckpointNotFoundError
    │   ├── WeightsError
    │   ├── UnknownArchitectureError           architecture, known
    │   └── UnsupportedTaskError               architecture, task, known
    ├── InsufficientMemoryError                needed, available
    │   └── InsufficientBlocksError            free, total
    │       └── InsufficientStatesError
    ├── ForkedProcessError (RuntimeError)      origin, process
    └── MissingDependencyError (ImportError)   package, extra

An error that a caller or the environment can cause raises one of these exceptions. A failed ``assert`` is a
bug in Penstock.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PenstockError(Exception):
    """The base class of all exceptions of Penstock."""


class InputError(PenstockError, ValueError):
    """The prompt, the parameters or their combination cannot be served."""


class PromptTooLongError(InputError):
    """A prompt leaves no room for output within ``max_length`` tokens.

    For a task without generated tokens: the input has more than ``max_length`` tokens.

    Args:
        num_tokens: the number of tokens of the prompt.
        max_length: the maximum length, in tokens.
        is_exact: False if only the beginning of the prompt was tokenized, so the prompt has more tokens.
        has_output: whether the maximum length includes generated tokens.
    """

    def __init__(
        self, num_tokens: int, max_length: int, *, is_exact: bool = True, has_output: bool = True
    ) -> None:
        count = str(num_tokens) if is_exact else f"more than {num_tokens}"
        text = (
            f"the prompt has {count} tokens, but the maximum length is {max_length} tokens, "
            "prompt and output together: shorten the prompt or raise --max-length"
        )
        if not has_output:
            text = (
                f"the input has {count} tokens, but the maximum length is {max_length} tokens: "
                "shorten it, truncate it, or raise --max-length"
            )
        super().__init__(text)
        self.num_tokens = num_tokens
        self.max_length = max_length
        self.is_exact = is_exact


class TaskMismatchError(InputError):
    """The request belongs to a different task than the loaded model.

    Args:
        request: what was requested, such as ``"LLM.generate"`` or ``"a TTSContext"``.
        task: the task of the request; None if it follows from ``request``.
        served: the task that the model is loaded for.
    """

    def __init__(self, request: str, task: str | None, served: str) -> None:
        needs = "is a request of another task" if task is None else f"needs a model of the task {task}"
        super().__init__(
            f"{request} {needs}, but this model is loaded for {served}: use another model, or load this one "
            f"with --task {task or 'TASK'} if its architecture supports that"
        )
        self.task = task
        self.served = served


class UnsupportedFeatureError(InputError):
    """The model, the back end or the combination of features does not support a request."""

    def __init__(self, feature: str, reason: str) -> None:
        super().__init__(f"{feature} is not supported: {reason}")
        self.feature = feature


class UnsupportedSchemaError(UnsupportedFeatureError):
    """A JSON schema uses a keyword that cannot be converted to a grammar.

    Such keywords are never ignored, because the grammar would then accept outputs that violate the schema.
    """

    def __init__(self, keyword: str, where: str, reason: str) -> None:
        super().__init__(f"the JSON schema keyword {keyword!r} (at {where})", reason)
        self.keyword = keyword
        self.where = where


class UnknownModelError(InputError):
    """A request names a model or adapter that the server does not serve."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(f"the model {model!r} is not served here; served are: {', '.join(names)}")
        self.model = model
        self.known = names


class UnknownParameterError(InputError, TypeError):
    """A call has an unknown keyword argument. It is also a ``TypeError``, like Python's exception."""

    def __init__(self, owner: str, parameter: str, hint: str) -> None:
        super().__init__(f"{owner}: unknown parameter {parameter}; {hint}")
        self.parameter = parameter


class RequestFailedError(PenstockError):
    """An internal error ended the request. The log contains the error. Other requests continue."""


class UnavailableError(PenstockError):
    """The request cannot be served now, for example because the worker is being restarted."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # whole seconds


class OverloadedError(UnavailableError):
    """The queue is full."""


class RankFailedError(UnavailableError):
    """A rank of a divided model has failed, has ended or does not respond. The loaded model is lost.

    A server restarts all processes of the model. Other programs must load the model again.
    """


class ConfigError(PenstockError, ValueError):
    """A configuration field is unknown, or has an invalid value, or one that the model does not support."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class CheckpointError(PenstockError, ValueError):
    """A checkpoint cannot be read or used."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint at the path or hub id, or it cannot be downloaded."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected, or have a wrong shape, or their file is damaged."""


class UnknownArchitectureError(CheckpointError):
    """Penstock does not implement the checkpoint's ``model_type``, or the architecture of its GGUF file."""

    def __init__(self, path: object, architecture: str, known: Iterable[str]) -> None:
        names = sorted(known)
        similar_names = get_close_matches(architecture, names, n=1, cutoff=0.5)
        hint = f"; did you mean {similar_names[0]}?" if similar_names else ""
        super().__init__(
            path, f"architecture {architecture!r} is not known (known: {', '.join(names)}){hint}"
        )
        self.architecture = architecture
        self.known = names


class UnsupportedTaskError(CheckpointError):
    """The checkpoint's architecture has no pipeline for the task, or Penstock has none."""

    def __init__(self, path: object, architecture: str, task: str, known: Iterable[str]) -> None:
        tasks = list(known)
        hint = f"pass --task {tasks[0]}" if tasks else "use a checkpoint of another task"
        super().__init__(
            path,
            f"architecture {architecture!r} has no pipeline for the task {task} (it has: "
            f"{', '.join(tasks) or 'none'}): {hint}",
        )
        self.architecture = architecture
        self.task = task
        self.known = tasks


class InsufficientMemoryError(PenstockError):
    """Weights, activations or the smallest permitted KV cache do not fit into the available memory."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class InsufficientBlocksError(InsufficientMemoryError):
    """The KV cache has too few free blocks for a request. No block was reserved for this request."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} KV blocks are needed, {free} of {total} are free: "
            "run fewer requests at once, shorten them, or give the KV cache more memory",
            needed=needed,
            available=free,
        )
        self.free = free
        self.total = total


class InsufficientStatesError(InsufficientBlocksError):
    """All recurrent states of a model with linear attention are used. No state was assigned."""

    def __init__(self, total: int) -> None:
        InsufficientMemoryError.__init__(
            self,
            f"all {total} recurrent states are used: run fewer requests at once, or raise max_batch_size",
            needed=1,
            available=0,
        )
        self.free, self.total = 0, total


class ForkedProcessError(PenstockError, RuntimeError):
    """A model is used or loaded in a process that was forked after a model had been loaded."""

    def __init__(self, origin: int, process: int) -> None:
        super().__init__(
            f"process {process} was forked from process {origin}, which had loaded a model: the threads that "
            "compute do not survive a fork. Start the process with the 'spawn' or 'forkserver' method of "
            "multiprocessing and load the model there, or fork before any model is loaded"
        )
        self.origin = origin
        self.process = process

    def __reduce__(self) -> tuple[type[ForkedProcessError], tuple[int, int]]:
        return type(self), (self.origin, self.process)


class MissingDependencyError(PenstockError, ImportError):
    """An optional package is missing. The message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'penstock-llm[{extra}]'")
        self.package = package
        self.extra = extra

"""Every error a caller can cause, in one tree.

    PenstockError
    ├── InputError (ValueError)               one request cannot be served as asked
    │   ├── PromptTooLongError                num_tokens, max_length
    │   ├── TaskMismatchError                 task, served
    │   ├── UnknownModelError                 model, known
    │   ├── UnknownParameterError (TypeError)  parameter
    │   └── UnsupportedFeatureError           feature
    │       └── UnsupportedSchemaError        keyword, where
    ├── RequestFailedError                    one request hit a fault of ours
    ├── UnavailableError                      retry_after: nobody can be served now
    │   └── OverloadedError                   too many wait already
    ├── ConfigError (ValueError)              field
    ├── CheckpointError (ValueError)          path
    │   ├── CheckpointNotFoundError
    │   ├── WeightsError
    │   ├── UnknownArchitectureError          architecture, known
    │   └── UnsupportedTaskError              architecture, task, known
    ├── InsufficientMemoryError               needed, available
    │   └── InsufficientBlocksError           needed, free, total
    ├── ForkedProcessError (RuntimeError)     origin: the process that the threads were left in
    └── MissingDependencyError (ImportError)  package, extra

An ``assert`` anywhere in Penstock marks a mistake of ours; what a caller can cause raises one of these,
with the numbers in it and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PenstockError(Exception):
    """The root of all errors that a caller of Penstock can cause."""


class InputError(PenstockError, ValueError):
    """A request is refused: its prompt, its parameters or their combination cannot be served."""


class PromptTooLongError(InputError):
    """The prompt leaves no room for a new token under the maximum length."""

    def __init__(self, num_tokens: int, max_length: int, *, is_exact: bool = True) -> None:
        count = str(num_tokens) if is_exact else f"more than {num_tokens}"
        super().__init__(
            f"the prompt has {count} tokens, but the maximum length is {max_length} tokens, "
            "prompt and output together: shorten the prompt or raise --max-length"
        )
        self.num_tokens = num_tokens
        self.max_length = max_length


class TaskMismatchError(InputError):
    """A request belongs to another task than the one that the model is loaded for.

    Args:
        request: what was requested, such as ``"LLM.generate"`` or ``"a TTSContext"``.
        task: the task that the request belongs to; None where it follows from ``request``.
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
    """A request asks for something that this model, back end or combination cannot do."""

    def __init__(self, feature: str, reason: str) -> None:
        super().__init__(f"{feature} is not supported: {reason}")
        self.feature = feature


class UnsupportedSchemaError(UnsupportedFeatureError):
    """A JSON schema uses a keyword that no grammar can be made of; a looser grammar is never used instead."""

    def __init__(self, keyword: str, where: str, reason: str) -> None:
        super().__init__(f"the JSON schema keyword {keyword!r} (at {where})", reason)
        self.keyword = keyword
        self.where = where


class UnknownModelError(InputError):
    """A request names a model, or an adapter, that is not served here."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        names = list(known)
        super().__init__(f"the model {model!r} is not served here; served are: {', '.join(names)}")
        self.model = model
        self.known = names


class UnknownParameterError(InputError, TypeError):
    """A call has a keyword argument that the function does not take; a ``TypeError`` too, as Python's own."""

    def __init__(self, owner: str, parameter: str, hint: str) -> None:
        super().__init__(f"{owner}: unknown parameter {parameter}; {hint}")
        self.parameter = parameter


class RequestFailedError(PenstockError):
    """A request ended because of a fault of ours, which the log shows; others went on untouched."""


class UnavailableError(PenstockError):
    """Nobody can be served now: the model is loading, or being loaded again."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # whole seconds


class OverloadedError(UnavailableError):
    """As many requests as are let in wait already."""


class ConfigError(PenstockError, ValueError):
    """A configuration field is unknown, of the wrong type, or has an impossible value."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class CheckpointError(PenstockError, ValueError):
    """A checkpoint cannot be read."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)


class CheckpointNotFoundError(CheckpointError):
    """The path or hub id names no checkpoint that can be reached."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected, misshapen, or their file is damaged."""


class UnknownArchitectureError(CheckpointError):
    """The checkpoint's ``model_type`` has no folder under ``penstock/pipelines/architectures``."""

    def __init__(self, path: object, architecture: str, known: Iterable[str]) -> None:
        names = sorted(known)
        nearest = get_close_matches(architecture, names, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        super().__init__(
            path, f"architecture {architecture!r} is not known (known: {', '.join(names)}){hint}"
        )
        self.architecture = architecture
        self.known = names


class UnsupportedTaskError(CheckpointError):
    """The checkpoint's architecture, or Penstock as a whole, has no pipeline for the task."""

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
    """Weights, activations or the smallest useful KV cache do not fit the memory there is."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class InsufficientBlocksError(InsufficientMemoryError):
    """The KV cache has too few free blocks for a reservation; nothing was reserved."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} KV blocks are needed, {free} of {total} are free: "
            "run fewer requests at once, shorten them, or give the KV cache more memory",
            needed=needed,
            available=free,
        )
        self.free = free
        self.total = total


class ForkedProcessError(PenstockError, RuntimeError):
    """A forked process uses a model, or loads one, after its parent has loaded one: a step would hang."""

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
    """An optional package is needed; the message says which extra installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'penstock-llm[{extra}]'")
        self.package = package
        self.extra = extra

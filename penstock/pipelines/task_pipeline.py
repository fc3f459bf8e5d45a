"""`TaskPipeline`: the interface that `assembly` and the worker use for pipelines of all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from penstock.errors import PenstockError, TaskMismatchError
from penstock.kv_cache.interface import KVCache, NullKVCache
from penstock.pipelines.core import InputContext, PipelineTask, VoicePrompt, context_type
from penstock.pipelines.core.interfaces import PipelineOutput, StepLauncher

if TYPE_CHECKING:
    from penstock.distributed.processes import RankProcesses
    from penstock.engine import InferenceSession
    from penstock.lora import LoRAManager
    from penstock.memory import MemoryPlan
    from penstock.pipelines.speculative import SpeculationStats

ContextT = TypeVar("ContextT", bound=InputContext)
OutputT = TypeVar("OutputT", bound=PipelineOutput)


class TaskPipeline(ABC, Generic[ContextT, OutputT]):
    """The base class of the pipelines of all tasks.

    A subclass sets `task` and `context_types`, implements `execute`, and overrides the methods of optional
    features. The defaults are for a pipeline without KV cache, adapters, grammars and speculation.

    Args:
        session: devices, kernels and threads.
        memory_plan: the limits for the scheduler.
        kv: the KV cache; by default a `NullKVCache`.
    """

    task: ClassVar[PipelineTask]
    context_types: ClassVar[tuple[type[InputContext], ...]]
    """The context types that `execute` accepts."""
    chunks_prompts: ClassVar[bool] = True
    """Whether `execute` accepts parts of a prompt. Bidirectional attention needs the whole input in one step.
    If this is False, the scheduler runs an input that exceeds the token budget in a separate step.
    """

    speculation_stats: SpeculationStats | None = None
    """Counts of drafted tokens; None without speculation."""

    def __init__(self, session: InferenceSession, memory_plan: MemoryPlan, kv: KVCache | None = None) -> None:
        self.session = session
        self.memory_plan = memory_plan
        self.kv: KVCache = NullKVCache() if kv is None else kv
        self.failures: dict[str, PenstockError] = {}
        """The errors of requests that ended in `execute` without an output. The caller of `execute` removes
        an entry when it has reported the error, and releases the context."""
        self.processes: RankProcesses | None = None
        """The processes of the other ranks; None for one process. `close` ends them."""

    @abstractmethod
    def execute(self, batch: Mapping[str, ContextT], num_steps: int = 1) -> dict[str, OutputT]:
        """Run up to ``num_steps`` steps and return the output of each context, by request id.

        Raises:
            PenstockError: a context cannot be served; no context has new tokens.
        """

    def release(self, context: ContextT) -> None:
        """Free the resources of a context. Does nothing if they are freed already."""
        self.kv.release(context)

    def discard_cache(self) -> None:
        """Return the memory of the KV cache to the system. Later steps allocate the memory again.

        No context may have a KV cache slot.

        Raises:
            UnsupportedFeatureError: the memory of the device cannot be returned.
        """
        self.kv.discard_storage()

    def ready(self, context: ContextT) -> bool:
        """Return whether the context can be scheduled now.

        Raises:
            PenstockError: the context can never be scheduled.
        """
        self.check_context_types([context])
        return True

    def check_context_types(self, contexts: Iterable[InputContext]) -> None:
        """Check that contexts belong to the task of this pipeline.

        Raises:
            TaskMismatchError: a context belongs to another task.
        """
        for context in contexts:
            if (context_class := context_type(context)) not in self.context_types:
                request = f"request {context.request_id}, a {context_class.__name__},"
                raise TaskMismatchError(request, None, self.task.option)

    @property
    def overlapped_steps(self) -> StepLauncher[ContextT, OutputT, Any] | None:
        """Launches a step while the previous step runs; None if only `execute` can run steps."""
        return None

    def num_steps_for(self, seconds: float) -> int:
        """Estimate how many steps one `execute` call can run in ``seconds``; by default 1."""
        return 1

    def prepare_next(self) -> bool:
        """Do one part of the preparation that can wait until the process is idle.

        A part takes a fraction of a second. It packs a weight or allocates pages of the KV cache. Steps do
        the remaining parts when they need them.

        Returns:
            Whether more parts may remain.
        """
        return self.kv.prefault_next_pages()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that a request may choose; empty for tasks with one output."""
        return ()

    @property
    def embedding_size(self) -> int:
        """The length of a dense embedding; 0 for other tasks."""
        return 0

    @property
    def sample_rate(self) -> int:
        """Samples per second of generated audio; 0 for other tasks."""
        return 0

    @property
    def voices(self) -> Mapping[str, VoicePrompt]:
        """The configured voices to imitate, by name; empty for tasks without audio."""
        return {}

    @property
    def image_counts(self) -> tuple[int, int]:
        """The number of encoded images, and the number of hits in the encoder cache."""
        return 0, 0

    @property
    def lora_manager(self) -> LoRAManager | None:
        """The LoRA adapters; None if they are not enabled."""
        return None

    @property
    def supports_grammars(self) -> bool:
        """Whether contexts may have a grammar."""
        return False

    def close(self) -> None:
        """Stop the other ranks of the model. Subclasses also stop the threads that they have started."""
        if self.processes is not None:
            self.processes.close()


AnyTaskPipeline: TypeAlias = TaskPipeline[Any, Any]
"""A pipeline of any task."""

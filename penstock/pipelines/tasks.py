"""The table of tasks: the pipeline, contexts, outputs and tokenizer of each `PipelineTask`.

`penstock.assembly` reads this table. The scheduler and the worker do not: they treat all pipelines as
`penstock.pipelines.task_pipeline.TaskPipeline`. ``docs/adding-a-task.md`` describes how to add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.architectures.registry import PipelineRegistry, SupportedArchitecture, load_class, load_object
from penstock.host.memory import PrefaultedMemory
from penstock.pipelines.core import (
    AudioGenerationResponse,
    EmbeddingsContext,
    EmbeddingsResponse,
    InputContext,
    PipelineTask,
    TextAndVisionContext,
    TextContext,
    TextGenerationResponse,
    TTSContext,
)
from penstock.pipelines.core.interfaces import PipelineOutput

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.distributed.ranks import Ranks
    from penstock.engine import InferenceSession
    from penstock.pipelines.task_pipeline import AnyTaskPipeline


@dataclass(frozen=True, kw_only=True)
class PipelineRequirements:
    """The arguments of a `PipelineFactory`."""

    config: PipelineConfig
    architecture: SupportedArchitecture
    """The architecture of the configured checkpoint for the task of the pipeline."""
    tokenizer: Any
    """The tokenizer, an instance of the class that `TaskRecord.load_tokenizer_class` returned."""
    registry: PipelineRegistry
    """The registry for the architectures of further checkpoints, such as a draft model."""
    prefaulted: PrefaultedMemory = field(default_factory=PrefaultedMemory)
    """Memory for the packed weights of the model, passed to its `penstock.engine.InferenceSession`."""
    ranks: Ranks | None = None
    """The processes among which the model is divided; None for one process."""

    def open_session(self) -> InferenceSession:
        """Return a new session of the model: devices, kernels, threads and ranks.

        With ranks, the session uses the first device, and an equal share of the threads if ``num_threads`` is
        set.
        """
        from penstock.driver import load_devices
        from penstock.engine import InferenceSession

        model, num_threads = self.config.model, self.config.num_threads
        if self.ranks is not None and num_threads is not None:
            num_threads = max(num_threads // self.ranks.world_size, 1)
        return InferenceSession(
            load_devices(model.devices[:1]) if self.ranks else load_devices(model.devices),
            num_threads=num_threads,
            kernels=model.kernels,
            prefaulted=self.prefaulted,
            deterministic=self.config.deterministic,
            ranks=self.ranks,
        )


PipelineFactory: TypeAlias = "Callable[[PipelineRequirements], AnyTaskPipeline]"


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One row of the table; creating it loads neither torch nor the pipeline."""

    task: PipelineTask
    factory: str | PipelineFactory
    """Loads the model and returns the pipeline. A factory given as ``"module:function"`` is imported when the
    pipeline is loaded.
    """
    context_types: tuple[type[InputContext], ...]
    """The context types that the pipeline accepts; all are members of
    `penstock.pipelines.core.RequestContext`.
    """
    output_type: type[PipelineOutput]
    """The type of the outputs of ``execute``. `penstock.worker.outputs` sends them to the server."""
    tokenizer: str | type = "penstock.text.tokenizer:TextTokenizer"
    """The tokenizer or processor of architectures that do not name one."""
    tokenizer_settings: tuple[str, ...] = ()
    """The names of settings that are passed to the tokenizer's constructor as keyword arguments."""

    def load_factory(self) -> PipelineFactory:
        """Return the factory; loads torch."""
        return load_object(self.factory) if isinstance(self.factory, str) else self.factory

    def load_tokenizer_class(self, architecture: SupportedArchitecture) -> type[Any]:
        """Return the class of an architecture's tokenizer; loads no torch."""
        return load_class(architecture.tokenizer or self.tokenizer)


TaskTable: TypeAlias = Mapping[PipelineTask, TaskRecord]

TASKS: TaskTable = MappingProxyType(
    {
        PipelineTask.TEXT_GENERATION: TaskRecord(
            task=PipelineTask.TEXT_GENERATION,
            factory="penstock.pipelines.text_generation_factory:create_text_generation",
            context_types=(TextContext, TextAndVisionContext),
            output_type=TextGenerationResponse,
        ),
        PipelineTask.EMBEDDINGS_GENERATION: TaskRecord(
            task=PipelineTask.EMBEDDINGS_GENERATION,
            factory="penstock.pipelines.embeddings:create_embeddings",
            context_types=(EmbeddingsContext,),
            output_type=EmbeddingsResponse,
            tokenizer="penstock.text.embeddings_tokenizer:EmbeddingsTokenizer",
        ),
        PipelineTask.SPEECH_TOKEN_GENERATION: TaskRecord(
            task=PipelineTask.SPEECH_TOKEN_GENERATION,
            factory="penstock.pipelines.speech_tokens:create_speech_tokens",
            context_types=(TTSContext,),
            output_type=TextGenerationResponse,
            tokenizer="penstock.text.speech_tokenizer:SpeechTokenizer",
            tokenizer_settings=("speech_format",),
        ),
        PipelineTask.AUDIO_GENERATION: TaskRecord(
            task=PipelineTask.AUDIO_GENERATION,
            factory="penstock.pipelines.audio:create_audio",
            context_types=(TTSContext,),
            output_type=AudioGenerationResponse,
            tokenizer="penstock.text.speech_tokenizer:SpeechTokenizer",
            tokenizer_settings=("speech_format",),
        ),
    }
)
"""The tasks for which Penstock has pipelines."""

"""Generation and embedding of datasets on Ray Data. Each actor of a pool loads the model.

    dataset = ray.data.read_parquet("prompts/")            # or read_json for JSON lines
    penstock.ray.generate(dataset, "./model").write_parquet("answers/")

Ray Data streams blocks of rows through the actors. An actor computes up to two blocks concurrently. Ray Data
stops reading the dataset while all actors are busy. If an actor ends, another actor computes the unfinished
blocks again. Each input row becomes exactly one output row. If the model cannot process a row, the column
``error`` of the row has the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from penstock.config import PipelineConfig, PipelineOptions
from penstock.errors import ConfigError, InputError, UnavailableError
from penstock.pipelines.core import SamplingParams
from penstock.ray.arrow_values import without_nulls
from penstock.ray.cluster import import_ray
from penstock.ray.config import RayConfig
from penstock.ray.deployment import Resources, replica_config, usable_cpus
from penstock.ray.shared_start import SharedStart

if TYPE_CHECKING:
    from os import PathLike

    from penstock.llm.async_llm import AsyncLLM

_LOG = logging.getLogger("penstock.ray")

_MAX_CONCURRENT_BLOCKS = 2
"""Maximum number of blocks that an actor computes concurrently.

Rows of the second block fill the batch while the last rows of the first block finish.
"""
_MAX_ATTEMPTS = 60
"""Maximum number of attempts for a row while the worker process of the actor is being restarted."""
_RETRY_SECONDS = 1.0
"""Minimum seconds between two attempts."""


def generate(
    dataset: Any,
    model: str | PathLike[str] = "demo",
    *,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    output_column: str = "generated_text",
    sampling_params: SamplingParams | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 64,
    num_cpus: int | None = None,
    **config: Unpack[PipelineOptions],
) -> Any:
    """Return a dataset with the generated text of each row.

    The model runs only when the dataset is read or written. If there is no Ray cluster, Ray Data starts Ray
    on this machine.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: ``demo``, a checkpoint folder that exists on all nodes, or an id on the Hugging Face hub.
        prompt_column: the column of prompts. A prompt is a text or a list of token ids.
        messages_column: the column of conversations. A conversation is a list of messages. If this column is
            given, ``prompt_column`` is not read.
        output_column: the new column of texts. The columns ``finish_reason`` (``stop`` or ``length``),
            ``num_generated_tokens`` and ``error`` are added, too. If a row has an error, its other new
            values are null.
        sampling_params: the sampling parameters. The default is the sampling parameters of the checkpoint.
        concurrency: the number of actors, or a pair of minimum and maximum.
        batch_size: rows per block. A block is computed again if its actor ends.
        num_cpus: number of CPUs that each actor reserves and of its compute threads. The default is
            ``num_threads`` if it is set, else 1 per GPU if the model runs on GPUs, else all CPUs of this
            machine except one, divided by the minimum number of actors.
        **config: settings of the model.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: a setting is unknown or has an invalid value.
        CheckpointError: the model does not exist.
    """
    arguments = {
        "input_column": messages_column or prompt_column,
        "output_column": output_column,
        "sampling_params": sampling_params,
        "is_chat": messages_column is not None,
    }
    return _map_with_model(dataset, TextActor, arguments, model, concurrency, batch_size, num_cpus, config)


def embed(
    dataset: Any,
    model: str | PathLike[str],
    *,
    text_column: str = "text",
    output_column: str = "embedding",
    prompt_name: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
    truncate: bool = False,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 64,
    num_cpus: int | None = None,
    **config: Unpack[PipelineOptions],
) -> Any:
    """Return a dataset with the embedding of each row. An embedding is a list of floats.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: a checkpoint folder that exists on all nodes, or an id on the Hugging Face hub.
        text_column: the column of texts.
        output_column: the new column of embeddings. The column ``error`` is added, too. The embedding is null
            if the row has an error.
        prompt_name: see `AsyncLLM.embed`.
        dimensions: see `AsyncLLM.embed`.
        normalize: see `AsyncLLM.embed`.
        truncate: see `AsyncLLM.embed`.
        concurrency: see `generate`.
        batch_size: see `generate`.
        num_cpus: see `generate`.
        **config: see `generate`.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: a setting is unknown or has an invalid value.
        CheckpointError: the model does not exist.
    """
    options = {
        "prompt_name": prompt_name,
        "dimensions": dimensions,
        "normalize": normalize,
        "truncate": truncate,
    }
    arguments = {"input_column": text_column, "output_column": output_column, "options": options}
    return _map_with_model(
        dataset, EmbeddingActor, arguments, model, concurrency, batch_size, num_cpus, config
    )


def _map_with_model(
    dataset: Any,
    actor: type[ModelActor],
    arguments: dict[str, Any],
    model: str | PathLike[str],
    concurrency: int | tuple[int, int],
    batch_size: int,
    num_cpus: int | None,
    config: Mapping[str, Any],
) -> Any:
    """Check the arguments and return a dataset whose blocks are computed by a pool of actors."""
    import_ray(f"penstock.ray.{actor.function_name}")
    min_actors, max_actors = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    if num_cpus is None and config.get("num_threads") is None and config.get("devices") is None:
        num_cpus = max((usable_cpus() - 1) // min_actors, 1)  # 1 CPU for tasks that read and write
    ray_config = RayConfig(
        ray_min_replicas=min_actors, ray_max_replicas=max_actors, ray_cpus=num_cpus, ray_batch_size=batch_size
    )
    pipeline_config = PipelineConfig.from_flat({"model_path": model, **config}, "argument")
    pipeline_config.model.checkpoint  # noqa: B018  # raises here, not in an actor, if the model is missing
    return map_with_actors(dataset, actor, arguments, pipeline_config, ray_config)


def map_with_actors(
    dataset: Any,
    actor: type,
    arguments: dict[str, Any],
    config: PipelineConfig,
    ray_config: RayConfig,
) -> Any:
    """Return a dataset whose blocks are computed by actors.

    Args:
        dataset: a ``ray.data.Dataset``.
        actor: the class of the actors.
        arguments: the keyword arguments of the actor's constructor, except ``config``.
        config: the configuration of the model.
        ray_config: the number of actors, the CPUs per actor, and the rows per block.
    """
    from ray import cluster_resources
    from ray.data import ActorPoolStrategy

    resources = Resources.of(config, ray_config)
    reserved_cpus, available_cpus = (
        ray_config.ray_min_replicas * resources.num_cpus,
        cluster_resources().get("CPU", 0),
    )
    if reserved_cpus >= available_cpus:
        _LOG.warning(
            "%d actors with %d CPUs each reserve all %d CPUs of the cluster: tasks that read and write data "
            "wait until the cluster has more CPUs. Use fewer actors, or fewer CPUs per actor.",
            ray_config.ray_min_replicas,
            resources.num_cpus,
            available_cpus,
        )
    pool = ActorPoolStrategy(
        min_size=ray_config.ray_min_replicas,
        max_size=ray_config.max_replicas,
        max_tasks_in_flight_per_actor=2 * _MAX_CONCURRENT_BLOCKS,
    )
    blocks = dataset.repartition(target_num_rows_per_block=ray_config.ray_batch_size)
    return blocks.map_batches(
        actor,
        batch_size=ray_config.ray_batch_size,
        batch_format="pyarrow",
        fn_constructor_kwargs={"config": replica_config(config, resources), **arguments},
        compute=pool,
        max_concurrency=_MAX_CONCURRENT_BLOCKS,
        **resources.options,
    )


class ModelActor:
    """An actor that loads a model. Base class of `TextActor` and `EmbeddingActor`.

    Calls for several blocks run concurrently. Rows of different blocks share the model's batches.

    Args:
        config: the configuration of the model.
        input_column: the column of inputs.
    """

    function_name = ""
    """The name of the function of `penstock.ray` that uses the actor, for error messages."""

    def __init__(self, config: PipelineConfig, input_column: str) -> None:
        from penstock.llm.async_llm import AsyncLLM

        self._input_column = input_column
        self._llm = AsyncLLM.from_config(config)
        self._start = SharedStart(self._llm.start)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Compute a block, which is a ``pyarrow.Table``, and yield the block with the new columns.

        New columns replace columns with the same names.

        Raises:
            ConfigError: the block has no input column.
        """
        import pyarrow

        await self._start()
        if self._input_column not in batch.column_names:
            raise ConfigError(
                "column",
                f"there is no column {self._input_column!r}: the dataset has {', '.join(batch.column_names)}",
            )
        values = batch.column(self._input_column).to_pylist()
        outputs = await asyncio.gather(*(self._compute_row(value) for value in values))
        for name, arrow_type in self.columns.items():
            column = pyarrow.array([output.get(name) for output in outputs], arrow_type())
            if name in batch.column_names:
                batch = batch.drop_columns([name])
            batch = batch.append_column(name, column)
        yield batch

    async def _compute_row(self, value: Any) -> dict[str, Any]:
        """Return the values of a row's new columns, including ``error``.

        ``value`` is the value of the row in the input column.
        """
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return {**await self.compute(self._llm, value), "error": None}
            except UnavailableError as error:  # the worker process is being restarted
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(max(_RETRY_SECONDS, error.retry_after))
            except InputError as error:
                return {"error": str(error)}
        raise AssertionError

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        """Name of each new column, including ``error`` -> function that returns its pyarrow type."""
        raise NotImplementedError

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        """Return the values of a row's new columns, without ``error``.

        ``value`` is the value of the row in the input column.

        Raises:
            InputError: the model cannot process the input.
            UnavailableError: the worker process is being restarted.
            PenstockError: computing the row failed. The Ray task then fails.
        """
        raise NotImplementedError


class TextActor(ModelActor):
    """Actor that generates a text for each row.

    Args:
        config: the configuration of the model.
        input_column: the column of prompts or conversations.
        output_column: the column of texts.
        sampling_params: the sampling parameters.
        is_chat: whether the inputs are conversations.
    """

    function_name = "generate"

    def __init__(
        self,
        config: PipelineConfig,
        input_column: str,
        output_column: str,
        sampling_params: SamplingParams | None,
        is_chat: bool,
    ) -> None:
        super().__init__(config, input_column)
        self._output_column = output_column
        self._params = sampling_params
        self._is_chat = is_chat

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        from pyarrow import int64, string

        return {
            self._output_column: string,
            "finish_reason": string,
            "num_generated_tokens": int64,
            "error": string,
        }

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        if value is None:
            raise InputError(f"the column {self._input_column} has no value in this row")
        if self._is_chat:
            (output,) = await llm.chat(without_nulls(value), self._params)
        else:
            (output,) = await llm.generate(value, self._params)
        return {
            self._output_column: output.text,
            "finish_reason": output.finish_reason,
            "num_generated_tokens": len(output.token_ids),
        }


class EmbeddingActor(ModelActor):
    """Actor that computes the embedding of each row.

    Args:
        config: the configuration of the model.
        input_column: the column of texts.
        output_column: the column of embeddings.
        options: keyword arguments of `AsyncLLM.embed`.
    """

    function_name = "embed"

    def __init__(
        self, config: PipelineConfig, input_column: str, output_column: str, options: dict[str, Any]
    ) -> None:
        super().__init__(config, input_column)
        self._output_column = output_column
        self._options = options

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        from pyarrow import float32, list_, string

        return {self._output_column: lambda: list_(float32()), "error": string}

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InputError(
                f"the column {self._input_column} must be a text, but has {value!r:.100} in this row"
            )
        return {self._output_column: await llm.embed(value, **self._options)}

"""Generation and embedding of datasets on Ray Data: one model in each actor of a pool.

    dataset = ray.data.read_parquet("prompts/")            # or read_json for JSON lines
    penstock.ray.generate(dataset, "./model").write_parquet("answers/")

Ray Data streams blocks through the actors. An actor computes up to two blocks concurrently.
Reading of the dataset stops while all actors are busy. A block whose actor ends is computed
again by another actor. Each input row becomes exactly one output row; an input that the model cannot serve
has the reason in the column ``error``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from penstock.config import PipelineConfig, PipelineOptions
from penstock.errors import ConfigError, InputError, UnavailableError
from penstock.pipelines.core import SamplingParams
from penstock.ray.cluster import import_ray
from penstock.ray.config import RayConfig
from penstock.ray.deployment import Resources, replica_config, usable_cpus
from penstock.ray.shared_start import SharedStart

if TYPE_CHECKING:
    from os import PathLike

    from penstock.llm.async_llm import AsyncLLM

_LOG = logging.getLogger("penstock.ray")

_MAX_CONCURRENT_BLOCKS = 2
"""Number of blocks that an actor computes concurrently. The second block fills the batch while the last rows
of the first finish."""
_MAX_ATTEMPTS = 60
_RETRY_SECONDS = 1.0


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

    Nothing runs until the dataset is read or written. Without a cluster Ray Data starts Ray on this machine.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: ``demo``, the folder of a checkpoint on all nodes, or an id on the Hugging Face hub.
        prompt_column: the column of prompts, texts or lists of token ids.
        messages_column: the column of conversations, lists of messages. It replaces ``prompt_column``.
        output_column: the new column of texts. The columns ``finish_reason`` (``stop`` or ``length``),
            ``num_generated_tokens`` and ``error`` are added, too; the text is null if the row has an error.
        sampling_params: the sampling parameters; by default those of the checkpoint.
        concurrency: the number of actors, or their minimum and maximum.
        batch_size: rows per block. A lost block is computed again.
        num_cpus: CPUs that each actor reserves, and its compute threads. By default ``num_threads`` if it is
            set; otherwise 1 for each GPU, or all CPUs of this machine except one, divided by the number of
            actors.
        **config: settings of the model.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: unknown setting or impossible value.
    """
    names = {
        "input": messages_column or prompt_column,
        "output": output_column,
        "sampling_params": sampling_params,
        "is_chat": messages_column is not None,
    }
    return _map_with_model(dataset, TextActor, names, model, concurrency, batch_size, num_cpus, config)


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
    """Return a dataset with the embedding of each row, a list of floats.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: the folder of a checkpoint on all nodes, or an id on the Hugging Face hub.
        text_column: the column of texts.
        output_column: the new column of embeddings. The column ``error`` is added, too; the embedding is null
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
        ConfigError: unknown setting or impossible value.
    """
    options = {
        "prompt_name": prompt_name,
        "dimensions": dimensions,
        "normalize": normalize,
        "truncate": truncate,
    }
    names = {"input": text_column, "output": output_column, "options": options}
    return _map_with_model(dataset, EmbeddingActor, names, model, concurrency, batch_size, num_cpus, config)


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
    """Return a dataset whose blocks are computed by a pool of actors."""
    import_ray(f"penstock.ray.{actor.function}")
    min_actors, max_actors = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    if num_cpus is None and config.get("num_threads") is None and config.get("devices") is None:
        num_cpus = max((usable_cpus() - 1) // min_actors, 1)  # 1 CPU for tasks that read and write
    ray_config = RayConfig(
        ray_min_replicas=min_actors, ray_max_replicas=max_actors, ray_cpus=num_cpus, ray_batch_size=batch_size
    )
    pipeline_config = PipelineConfig.from_flat({"model_path": model, **config}, "argument")
    pipeline_config.model.checkpoint  # noqa: B018  # a model that is missing is reported here
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
        arguments: the arguments of its constructor besides the configuration.
        config: the configuration of the model.
        ray_config: the number of actors, their CPUs, and the rows of a block.
    """
    from ray import cluster_resources
    from ray.data import ActorPoolStrategy

    resources = Resources.of(config, ray_config)
    reserved, available = ray_config.ray_min_replicas * resources.num_cpus, cluster_resources().get("CPU", 0)
    if reserved >= available:
        _LOG.warning(
            "%d actors of %d CPUs need all of the %d CPUs that the cluster has now: tasks that read and "
            "write data wait until there are more. Use fewer actors, or CPUs for each.",
            ray_config.ray_min_replicas,
            resources.num_cpus,
            available,
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
    """An actor with a model.

    Calls for several blocks run concurrently, and their rows share the model's batches.

    Args:
        config: the configuration of the model.
        input: the column of inputs.
    """

    function = ""
    """The function of `penstock.ray` that uses the actor, for error messages."""

    def __init__(self, config: PipelineConfig, input: str) -> None:
        from penstock.llm.async_llm import AsyncLLM

        self._input = input
        self._llm = AsyncLLM.from_config(config)
        self._start = SharedStart(self._llm.start)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Compute a block, a ``pyarrow.Table``, and yield it with the new columns."""
        import pyarrow

        await self._start()
        if self._input not in batch.column_names:
            raise ConfigError(
                "column",
                f"there is no column {self._input!r}: the dataset has {', '.join(batch.column_names)}",
            )
        values = batch.column(self._input).to_pylist()
        outputs = await asyncio.gather(*(self._row(value) for value in values))
        for name, kind in self.columns.items():
            column = pyarrow.array([output.get(name) for output in outputs], kind())
            if name in batch.column_names:
                batch = batch.drop_columns([name])
            batch = batch.append_column(name, column)
        yield batch

    async def _row(self, value: Any) -> dict[str, Any]:
        """Return the new columns of a row, from its input."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return {**await self.compute(self._llm, value), "error": None}
            except UnavailableError as error:  # retried, because the worker process is being restarted
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(max(_RETRY_SECONDS, error.retry_after))
            except InputError as error:
                return {"error": str(error)}
        raise AssertionError

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        """New column -> function that returns its type, including the column ``error``."""
        raise NotImplementedError

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        """Return the new columns of a row, without ``error``.

        Raises:
            PenstockError: the model cannot serve the row, or its worker has died.
        """
        raise NotImplementedError


class TextActor(ModelActor):
    """Generates a text for each row.

    Args:
        config: the configuration of the model.
        input: the column of prompts or conversations.
        output: the column of texts.
        sampling_params: the sampling parameters.
        is_chat: whether the inputs are conversations.
    """

    function = "generate"

    def __init__(
        self,
        config: PipelineConfig,
        input: str,
        output: str,
        sampling_params: SamplingParams | None,
        is_chat: bool,
    ) -> None:
        super().__init__(config, input)
        self._output = output
        self._params = sampling_params
        self._is_chat = is_chat

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        from pyarrow import int64, string

        return {
            self._output: string,
            "finish_reason": string,
            "num_generated_tokens": int64,
            "error": string,
        }

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        if value is None:
            raise InputError(f"the column {self._input} has no value in this row")
        if self._is_chat:
            (output,) = await llm.chat(_without_nulls(value), self._params)
        else:
            (output,) = await llm.generate(value, self._params)
        return {
            self._output: output.text,
            "finish_reason": output.finish_reason,
            "num_generated_tokens": len(output.token_ids),
        }


class EmbeddingActor(ModelActor):
    """Computes the embedding of each row.

    Args:
        config: the configuration of the model.
        input: the column of texts.
        output: the column of embeddings.
        options: keyword arguments of `AsyncLLM.embed`.
    """

    function = "embed"

    def __init__(self, config: PipelineConfig, input: str, output: str, options: dict[str, Any]) -> None:
        super().__init__(config, input)
        self._output = output
        self._options = options

    @property
    def columns(self) -> Mapping[str, Callable[[], Any]]:
        from pyarrow import float32, list_, string

        return {self._output: lambda: list_(float32()), "error": string}

    async def compute(self, llm: AsyncLLM, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise InputError(f"the column {self._input} has {value!r:.100} in this row: it must be a text")
        return {self._output: await llm.embed(value, **self._options)}


def _without_nulls(value: Any) -> Any:
    """Return a structure without null members, which columns add to rows with different members."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

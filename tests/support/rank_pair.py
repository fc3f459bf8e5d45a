"""Processes of ranks that load several models in turn, because starting processes takes seconds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.architectures.followers import Follower
from penstock.distributed.processes import RankProcesses, RankSettings
from penstock.distributed.ranks import Ranks
from penstock.engine import InferenceSession
from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextGenerationPipeline
from penstock.ranks import rank_devices

TIMEOUT = 300.0
"""Timeout of a collective in seconds; long, because the machine may be busy."""


class _ModelClosed(Exception):
    """Raised on ranks above 0 when rank 0 unloads the current model."""


class _ClosableFollower(Follower):
    def close(self) -> None:
        raise _ModelClosed


def serve_models(ranks: Ranks) -> None:
    """Load and run each model that rank 0 sends."""
    while True:
        config, patch = pickle.loads(ranks.receive())
        if patch is not None:
            patch()
        model, session = _open(config, ranks)
        try:
            _ClosableFollower(model, model.load_kv_manager(session, model.memory_plan.kv_cache_size)).run(
                ranks
            )
        except _ModelClosed:
            continue


def _open(config: PipelineConfig, ranks: Ranks) -> tuple[Any, InferenceSession]:
    ranks.by_expert = config.parallel.expert_parallel
    session = InferenceSession(
        [rank_devices(config)[ranks.rank]],
        num_threads=1,
        kernels=config.model.kernels,
        ranks=ranks,
    )
    model = config.model
    architecture = PIPELINE_REGISTRY.retrieve_architecture(model.huggingface_config, model.checkpoint)
    return architecture.load_pipeline_model()(config, session), session


class RankPair:
    """A group of ranks that run pipelines. Rank 0 runs in this process.

    Args:
        world_size: number of ranks.
        settings: fields of `RankSettings`.
    """

    def __init__(self, world_size: int = 2, **settings: Any) -> None:
        devices = (torch.device("cpu"),) * world_size
        fields: dict[str, Any] = {"timeout": TIMEOUT, **settings}
        self.processes = RankProcesses(RankSettings(world_size, devices, **fields), serve_models)
        self.ranks = self.processes.join()
        self.world_size = world_size

    def load(self, checkpoint: Path, patch: Any = None, **settings: Any) -> TextGenerationPipeline:
        """Load a checkpoint on all ranks, in float32 by default. `unload` unloads it on ranks above 0.

        Args:
            checkpoint: the folder of the checkpoint.
            patch: a picklable function that ranks above 0 call before they load.
            settings: settings of the pipeline under flat names.
        """
        values = {
            "model_path": str(checkpoint),
            "quantization_encoding": "float32",
            "max_batch_size": 8,
            "tensor_parallel_size": self.world_size,
        }
        config = PipelineConfig.from_flat({**values, **settings})
        self.ranks.send(pickle.dumps((config, patch)))
        model = config.model
        architecture = PIPELINE_REGISTRY.retrieve_architecture(model.huggingface_config, model.checkpoint)
        self.ranks.by_expert = config.parallel.expert_parallel
        session = InferenceSession(num_threads=1, kernels=model.kernels, ranks=self.ranks)
        return TextGenerationPipeline(config, architecture.load_pipeline_model(), -1, session=session)

    def unload(self) -> None:
        """Unload the current model on ranks above 0."""
        self.ranks.send(pickle.dumps(("close", ())))

    @contextmanager
    def open(self, checkpoint: Path, patch: Any = None, **settings: Any) -> Iterator[TextGenerationPipeline]:
        """Load a checkpoint for the duration of a block; see `load`."""
        pipeline = self.load(checkpoint, patch, **settings)
        try:
            yield pipeline
        finally:
            self.unload()

    def close(self) -> None:
        """End the processes."""
        self.processes.close()

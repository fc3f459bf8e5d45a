"""`NetworkModel`: a model whose network is read from a checkpoint and packed for the back end.

This is the base class of decoders and encoders. A subclass builds the network (`build`), prepares inputs and
runs forwards. The subclass calls `begin_step` before each forward.
"""

from __future__ import annotations

import logging
import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.memory_profile import plan_from_measurement
from penstock.architectures.model import BaseContextType, PipelineModel
from penstock.calibration import CalibrationNetwork, pack_calibrated
from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.host.progress import LoadingProgress
from penstock.kernels import LazyWeight, Ops, PackedLinear, encoding_named, upload
from penstock.lora import Adapter, LoRAManager
from penstock.memory import estimate_activation_memory
from penstock.nn import Loader
from penstock.weights import Weights
from penstock.weights.lazy_packing import LazyPacking
from penstock.weights.packed_weights import open_packed

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig

_logger = logging.getLogger(__name__)


class NetworkModel(PipelineModel[BaseContextType]):
    """A model whose network is read from a checkpoint."""

    ignored_weights: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    """Patterns of the names of checkpoint tensors that the network need not read."""
    network: CalibrationNetwork

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.torch_device = self.devices[0].torch_device
        self._lora_manager: LoRAManager | None = None
        self.network = self._load_network()

    def _load_network(self) -> CalibrationNetwork:
        """Read the network, pack its calibrated layers, and load the adapters.

        `LazyPacking` packs the lazily packed layers later.
        """
        model = self.pipeline_config.model
        ops = self.session.ops
        shard = self.session.shard
        # A file of packed weights contains whole layers, so a rank with parts of layers cannot use it.
        can_read_packed = ops.packs_weights and shard.is_whole
        packed_reader = open_packed(model.packed_key, ops.layout) if can_read_packed else None
        if packed_reader is not None or not ops.packs_weights:
            self.session.prefaulted.release()  # this memory is only for weights packed in this process
        load_packed = None if packed_reader is None else packed_reader.take
        self._warn_about_dequantized_weights()
        loader = Loader(
            self.weights,
            model.encoding,
            self.torch_device,
            ops,
            load_packed,
            lazy="all",
            keep_stored=model.keeps_stored_layers,
            shard=shard,
            has_adapters=self.pipeline_config.lora.is_enabled or bool(model.embedding_layout.tasks),
        )
        network = self.read(self.weights, loader, self.huggingface_config, self.max_seq_len)
        if shard.by_expert and not loader.has_experts:
            raise ConfigError("expert_parallel", f"{model.name} has no experts: remove this setting")
        self.calibrate(self.pipeline_config, network, loader, ops)
        self._lora_manager = self._load_adapters(loader)
        self.lazy_packing = LazyPacking(loader.layers, self.session.reservations)
        return network

    @property
    def lora_manager(self) -> LoRAManager | None:
        return self._lora_manager

    @classmethod
    @abstractmethod
    def build(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> CalibrationNetwork:
        """Read the network from a checkpoint.

        Args:
            load: reads and packs the tensors.
            huggingface_config: the checkpoint's configuration.
            max_length: the longest sequence, in tokens.
        """

    @classmethod
    def ignored_tensors(cls, huggingface_config: HuggingFaceConfig) -> tuple[str, ...]:
        """Return patterns of the names of checkpoint tensors that the network need not read."""
        return (*cls.ignored_weights, *cls.tensor_names(huggingface_config).unread)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        names = cls.tensor_names(huggingface_config)
        min_tokens = cls.min_step_tokens(pipeline_config, huggingface_config)
        return estimate_activation_memory(
            pipeline_config, huggingface_config, names, min_step_tokens=min_tokens
        )

    @classmethod
    def read(
        cls, weights: Weights, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> CalibrationNetwork:
        """Build the network from all tensors of a checkpoint and show the progress.

        Raises:
            WeightsError: lists the missing, misshapen, unreadable and unexpected tensors.
        """
        with torch.no_grad(), LoadingProgress(weights.num_bytes) as progress:
            weights.on_read = progress.advance
            network = cls.build(load, huggingface_config, max_length)
            weights.on_read = None
        weights.finish(cls.ignored_tensors(huggingface_config))
        return network

    @classmethod
    def calibrate(
        cls,
        pipeline_config: PipelineConfig,
        network: CalibrationNetwork,
        load: Loader,
        ops: Ops,
    ) -> None:
        """Pack the layers that ``load`` has read and whose encoding needs activation statistics."""
        calibrated = [
            layer.tensors for layer in load.layers if encoding_named(layer.encoding).needs_calibration
        ]
        lazy_weights = [tensors for tensors in calibrated if isinstance(tensors, LazyWeight)]
        if not lazy_weights:
            return
        num_bytes = sum(part.nbytes for weight in lazy_weights for part in weight.parts)
        with torch.inference_mode(), LoadingProgress(num_bytes, title="quantizing") as progress:

            def pack(weight: LazyWeight, importance: Tensor | None = None) -> None:
                parts = weight.parts
                weight.pack(importance)
                beat()
                progress.advance(sum(part.nbytes for part in parts))

            config, shard = pipeline_config.model.huggingface_config, load.shard
            spec = cls.kv_spec(pipeline_config, config)
            if spec is not None and not shard.is_whole:
                spec = spec.with_kv_heads(shard.num_kv_heads)
            pack_calibrated(network, spec, ops, config, pack)
            for weight in lazy_weights:
                pack(weight)  # packs layers that the calibration forward did not use

    def measure_memory(self) -> None:
        memory, spec = self.session.memory, self.kv_cache_spec
        if memory is not None and spec is not None and self.session.ranks is None:
            self.memory_plan = plan_from_measurement(self, spec, memory)

    def begin_step(self) -> None:
        """Check that this process was not forked. Before the second forward, pack the remaining weights."""
        self.session.check_process()
        self.lazy_packing.begin_step()

    def pack_pending(self) -> bool:
        self.session.check_process()
        self.announce("pack_pending")
        return self.lazy_packing.pack_next()

    def announce(self, method: str, *arguments: object) -> None:
        """Make the other ranks call a method of their `Follower`.

        Does nothing without other ranks and on ranks above 0.
        """
        ranks = self.session.ranks
        if ranks is not None and ranks.rank == 0:
            ranks.send(pickle.dumps((method, arguments), protocol=pickle.HIGHEST_PROTOCOL))

    def _load_adapters(self, loader: Loader) -> LoRAManager | None:
        config, tasks = self.pipeline_config, self.task_adapters(loader)
        if not config.lora.is_enabled and not tasks:
            return None
        lora_ranks = (len(down) for adapter in tasks.values() for down, _ in adapter.matrices.values())
        adapters = LoRAManager(
            config.lora.with_checkpoint_adapters(len(tasks), max(lora_ranks, default=0)),
            self.adapted_layers(loader),
            self.weights,
            [config.model.model_path, config.model.name],
            dtype=loader.dtype,
            device=self.torch_device,
            rename=self.rename_adapter_tensor,
            parts=loader.parts,
            task_adapters=tasks,
            is_rank_0=self.session.shard.rank == 0,
        )
        if self.session.ranks is not None:
            adapters.on_put(lambda slot, matrices: self.announce("put_adapter", slot, dict(matrices)))
        return adapters

    def adapted_layers(self, loader: Loader) -> Mapping[str, PackedLinear]:
        """Return the linear layers that LoRA adapters may change, by name."""
        return loader.linears

    def task_adapters(self, loader: Loader) -> Mapping[str, Adapter]:
        """Return the task adapters that the checkpoint contains, by task name."""
        return {}

    @property
    def rename_adapter_tensor(self) -> Callable[[str], str | None] | None:
        """Maps tensor names of PEFT's model to names of this model; None if the names are equal."""
        return None

    def _warn_about_dequantized_weights(self) -> None:
        """Log the number and the size of quantized weights that are dequantized to floats."""
        model = self.pipeline_config.model
        if not model.keeps_stored_layers:
            return
        headers = model.tensor_headers.values()
        dequantized = [header for header in headers if header.is_dequantized]
        if dequantized:
            dtype = encoding_named(model.encoding).compute_dtype
            _logger.warning(
                "%d quantized weights are dequantized to %s, because no kernel multiplies them as stored: "
                "they take %.1f MB of memory instead of %.1f MB",
                len(dequantized),
                dtype.value,
                sum(header.num_elements for header in dequantized) * dtype.size_in_bytes / 1e6,
                sum(header.num_bytes for header in dequantized) / 1e6,
            )

    def _to_device(self, values: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return upload(np.ascontiguousarray(values, dtype=dtype), self.torch_device)

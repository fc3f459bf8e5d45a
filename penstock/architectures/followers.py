"""`Follower`: runs the steps of rank 0 on another rank.

Only rank 0 schedules, prepares inputs and samples. For each forward, it sends one message of a few kilobytes
with the tensors of the step. Then all ranks run the network. The other ranks have no contexts, text or
sampling parameters. The tokens that rank 0 samples are part of its next message. Block tables and cache slots
are equal on all ranks: a block contains the same tokens on each rank, but different heads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.decoder import DecoderModel
from penstock.architectures.step_messages import StepMessage
from penstock.distributed.ranks import Ranks
from penstock.kernels import SamplingInputs
from penstock.kv_cache import KVCacheManager


class Follower:
    """Runs the calls of rank 0 on a model of rank 1 or above.

    Args:
        model: the loaded part of this rank.
        kv: the KV cache with the heads of this rank. Its block tables are not used.
    """

    def __init__(self, model: DecoderModel, kv: KVCacheManager) -> None:
        self._model, self._kv = model, kv

    def run(self, ranks: Ranks) -> None:
        """Receive and run the calls of rank 0, until rank 0 closes the model.

        Raises:
            EOFError: rank 0 has closed the model.
            RankFailedError: another rank has ended.
        """
        while True:
            method, arguments = pickle.loads(ranks.receive())
            getattr(self, method)(*arguments)

    def execute(self, message: StepMessage) -> None:
        """Run one forward with the inputs of a message."""
        self._model.execute(message.inputs(self._kv, self._model.lora_manager))

    def execute_steps(self, message: StepMessage, num_steps: int, ends: np.ndarray) -> None:
        """Run several decode steps in one call. Rank 0 samples, so the sampling parameters have no effect."""
        inputs = message.inputs(self._kv, self._model.lora_manager)
        rows = len(inputs.tokens)
        unused = SamplingInputs(
            torch.zeros(rows),
            torch.zeros(rows, dtype=torch.int64),
            torch.ones(rows),
            torch.zeros(rows),
            torch.zeros(rows, dtype=torch.float64),
        )
        uniforms = torch.zeros(num_steps, rows, dtype=torch.float64)
        sampled = self._model.execute_steps(inputs, unused, uniforms, torch.from_numpy(ends))
        assert sampled is not None, "rank 0 runs a step that this rank has not compiled"

    def pack_pending(self) -> None:
        """Pack one lazily packed weight."""
        self._model.pack_pending()

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block of all layers of a group."""
        self._kv.storage.copy_block(group, source, target)

    def populate_cache(self, layer: int, first: int, end: int) -> None:
        """Allocate the pages of blocks of a layer, see `KVCacheStorage.populate`."""
        self._kv.storage.populate(layer, first, end)

    def discard_cache(self) -> None:
        """Return the memory of the KV cache to the system."""
        self._kv.discard_storage()

    def put_adapter(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter into a slot.

        ``matrices`` are those of whole layers, of which this rank stores its part.
        """
        adapters = self._model.lora_manager
        assert adapters is not None
        adapters.put(slot, matrices)

"""`Follower`: runs the steps of rank 0 on another rank.

Only rank 0 schedules, prepares inputs and samples. For each forward, or for a call of several decode steps,
rank 0 sends one message of a few kilobytes with the tensors of the step. Then all ranks run the network.
Ranks above 0 have no contexts, text or sampling parameters. The tokens that rank 0 samples are part of its
next message; within a call of several steps, a kernel broadcasts them. Block tables and cache slots are equal
on all ranks: a block contains the same tokens on each rank, but different kv heads.
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
    """Runs the calls that rank 0 sends, on the model of a rank above 0.

    Args:
        model: this rank's part of the model, loaded.
        kv: the KV cache with the heads of this rank. Its block tables are not used.
    """

    def __init__(self, model: DecoderModel, kv: KVCacheManager) -> None:
        self._model, self._kv = model, kv

    def run(self, ranks: Ranks) -> None:
        """Receive and run the calls of rank 0, until rank 0 closes the model.

        Raises:
            EOFError: rank 0 has closed the model or has ended.
            RankFailedError: another rank has ended or does not respond, or a step has failed.
        """
        while True:
            method, arguments = pickle.loads(ranks.receive())
            getattr(self, method)(*arguments)

    def execute(self, message: StepMessage) -> None:
        """Run one forward with the inputs of a message."""
        self._model.execute(message.inputs(self._kv, self._model.lora_manager))

    def execute_steps(self, message: StepMessage, num_steps: int, stop_ids: np.ndarray) -> None:
        """Run several decode steps in one call. Only rank 0 samples, so the sampling inputs are dummies."""
        inputs = message.inputs(self._kv, self._model.lora_manager)
        num_rows = len(inputs.tokens)
        dummy_sampling = SamplingInputs(
            torch.zeros(num_rows),
            torch.zeros(num_rows, dtype=torch.int64),
            torch.ones(num_rows),
            torch.zeros(num_rows),
            torch.zeros(num_rows, dtype=torch.float64),
        )
        uniforms = torch.zeros(num_steps, num_rows, dtype=torch.float64)
        sampled = self._model.execute_steps(inputs, dummy_sampling, uniforms, torch.from_numpy(stop_ids))
        assert sampled is not None, "rank 0 runs a step that this rank has not compiled"

    def pack_pending(self) -> None:
        """Pack one lazily packed weight, if one remains."""
        self._model.pack_pending()

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy block ``source`` to block ``target`` in all layers of a cache group."""
        self._kv.storage.copy_block(group, source, target)

    def populate_cache(self, layer: int, first: int, end: int) -> None:
        """Allocate the memory pages of blocks ``first`` to ``end - 1`` of a layer."""
        self._kv.storage.populate(layer, first, end)

    def discard_cache(self) -> None:
        """Return the memory of the KV cache to the operating system. Its content is lost."""
        self._kv.discard_storage()

    def put_adapter(self, slot: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put an adapter into a slot.

        ``matrices`` contains the adapter matrices of whole layers. This rank stores only its part of them.
        """
        adapters = self._model.lora_manager
        assert adapters is not None
        adapters.put(slot, matrices)

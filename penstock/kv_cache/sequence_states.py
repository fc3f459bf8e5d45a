"""`SequenceStates`: the recurrent states of sequences, and the states saved for their prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.errors import InsufficientStatesError
from penstock.kernels import StateInputs
from penstock.kv_cache.spec import StateSpec
from penstock.kv_cache.states import RecurrentStates, SavedStates


@dataclass(slots=True)
class SequenceState:
    """The recurrent state of one sequence."""

    slot: int
    length: int = 0  # number of tokens that the state includes
    num_cached_at_claim: int = 0  # number of leading blocks that were cached when the context was claimed
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (number of blocks, index) of the states that steps save and that are not committed yet."""


class SequenceStates:
    """The recurrent states of a model with linear attention, see `KVCacheSpec.states`.

    Args:
        spec: the shape of the states.
        num_states: the maximum number of sequences.
        saves_prefixes: whether steps save states, so that other sequences can continue from them.
        block_size: tokens per block of the KV cache.
        device: the device of the states.
    """

    def __init__(
        self, spec: StateSpec, num_states: int, *, saves_prefixes: bool, block_size: int, device: torch.device
    ) -> None:
        num_saved = num_states if saves_prefixes else 0
        self._tensors = RecurrentStates(spec, num_states, num_saved, device)
        self.saved = SavedStates(range(num_states, num_states + num_saved))
        self._num_states = num_states
        self._block_size = block_size

    def has_free(self, num_sequences: int) -> bool:
        """Return whether there is a state for another sequence beside ``num_sequences``."""
        return num_sequences < self._num_states

    def check_free(self, num_sequences: int) -> None:
        """Check that there is a state for another sequence beside ``num_sequences``.

        Raises:
            InsufficientStatesError: all states are used.
        """
        if not self.has_free(num_sequences):
            raise InsufficientStatesError(self._num_states)

    def restore(self, state: SequenceState, digests: Sequence[bytes]) -> None:
        """Copy the state that was saved after these blocks to a sequence. Does nothing without digests."""
        if digests:
            self._tensors.copy(self.saved.find(digests[-1]), state.slot)
            state.length = len(digests) * self._block_size

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Copy the state of a sequence to another sequence."""
        self._tensors.copy(parent.slot, child.slot)
        child.length = parent.length

    def inputs(
        self,
        states: Sequence[SequenceState],
        starts: Sequence[int],
        ends: Sequence[int],
        digest_functions: Sequence[Callable[[int], bytes | None]],
    ) -> StateInputs:
        """Return the states of a batch for its next step, and reserve space for the states that it saves.

        Args:
            states: the states of the sequences.
            starts: position of each sequence's first token in this step.
            ends: position after each sequence's last token in this step.
            digest_functions: for each sequence, a function that returns the digest of the last of the first n
                blocks, or None if the digest is unknown or the blocks must not be shared.
        """
        saves = []
        for state, start, end, digest_of in zip(states, starts, ends, digest_functions, strict=True):
            # A pending state after `start` belongs to a failed step: running steps end at `start` or before.
            self._release(state, [pair for pair in state.pending if pair[0] * self._block_size > start])
            state.length = end  # if the step fails, this differs from the position of the context
            saves.append(self._plan_saves(state, start, end, digest_of))
        return self._tensors.inputs([state.slot for state in states], saves)

    def commit(self, state: SequenceState, length: int, digests: Sequence[bytes]) -> None:
        """Record that a step has computed the tokens up to ``length``. Make its saved states available.

        Args:
            state: the state of the sequence.
            length: the number of computed tokens.
            digests: the digests of the computed blocks.
        """
        state.length = max(state.length, length)
        committed = [pair for pair in state.pending if pair[0] * self._block_size <= length]
        # With overlapped steps, a later step may already be running.
        state.pending = [pair for pair in state.pending if pair[0] * self._block_size > length]
        for num_blocks, index in committed:
            if num_blocks <= len(digests):
                self.saved.add(digests[num_blocks - 1], index)
            else:
                self.saved.free(index)

    def release(self, state: SequenceState) -> None:
        """Free the indices of states that steps should have saved, and that were not committed."""
        self._release(state, list(state.pending))

    def check_integrity(self, states: Iterable[SequenceState]) -> None:
        """Raise an AssertionError unless each saved, free and pending index occurs once."""
        pending = [index for state in states for _, index in state.pending]
        self.saved.check_integrity(pending)

    def discard(self) -> None:
        """Return the memory of all states to the system.

        Raises:
            UnsupportedFeatureError: the states are not in host memory.
        """
        self._tensors.discard()

    def _release(self, state: SequenceState, pairs: Sequence[tuple[int, int]]) -> None:
        for pair in pairs:
            self.saved.free(pair[1])
            state.pending.remove(pair)

    def _plan_saves(
        self, state: SequenceState, start: int, end: int, digest_of: Callable[[int], bytes | None]
    ) -> list[tuple[int, int]]:
        """Reserve indices for the states that a step of the positions ``start .. end - 1`` saves.

        These are the states at the last block boundary of the step, and at the end of the blocks that were
        cached when the context was claimed, unless they are saved already. A step of one row is a decode step
        and saves no state, because the copy would cost more time than the reuse of the state saves.

        Returns:
            Pairs of `StateInputs.saves`.
        """
        if end - start < 2:
            return []
        pairs = []
        for num_blocks in sorted({end // self._block_size, state.num_cached_at_claim}):
            position = num_blocks * self._block_size
            if not start < position <= end:
                continue
            digest = digest_of(num_blocks)
            if digest is None or digest in self.saved:
                continue
            if (index := self.saved.reserve()) is not None:
                state.pending.append((num_blocks, index))
                pairs.append((position - start, index))
        return pairs

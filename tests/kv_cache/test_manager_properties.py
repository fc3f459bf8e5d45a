"""Random sequences of cache operations in a cache that is too small for all contexts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.kv_contexts import block_tables, kv_manager, store_and_check_keys, text_context
from support.random_draws import num_examples

from penstock.errors import InsufficientBlocksError
from penstock.pipelines.core import TextContext

BLOCK_SIZE = 4
COMMON_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3  # each prompt begins with a prefix of this stream

ContextChoice = Callable[[list[TextContext]], TextContext]
context_choices = st.integers(0, 100).map(lambda n: lambda contexts: contexts[n % len(contexts)])


class Operations(RuleBasedStateMachine):
    """A test that claims, runs, rolls back, forks, preempts and releases contexts in random order."""

    windows: tuple[int | None, ...] = (None,)
    num_blocks: tuple[int, ...] = (14,)
    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = kv_manager(
            *self.num_blocks, windows=self.windows, block_size=BLOCK_SIZE, enable_prefix_caching=self.caching
        )
        self.waiting: list[TextContext] = []
        self.claimed: list[TextContext] = []

    @rule(
        num_common_tokens=st.integers(0, 20),
        own_tokens=st.lists(st.integers(0, 2), max_size=6),
        has_salt=st.booleans(),
    )
    def add_prompt(self, num_common_tokens: int, own_tokens: list[int], has_salt: bool) -> None:
        prompt = [*COMMON_TOKENS[:num_common_tokens], *own_tokens] or [0]
        self.waiting.append(text_context(prompt, cache_salt="ours" if has_salt else None))

    @precondition(lambda self: self.waiting)
    @rule(choice=context_choices, headroom=st.integers(0, 2))
    def claim(self, choice: ContextChoice, headroom: int) -> None:
        context = choice(self.waiting)
        self.manager.waits_for(context)
        is_admitted = self.manager.admits(context, headroom=headroom)
        num_free_before = self.manager.num_free_blocks
        is_first_claim = not len(context.generated_tokens)
        self.manager.claim(context)
        self.waiting.remove(context)
        self.claimed.append(context)
        assert context.start_idx % BLOCK_SIZE == 0
        assert context.start_idx < context.active_idx
        if is_first_claim:
            assert context.num_cached_tokens == context.start_idx
        if not self.caching:
            assert context.start_idx == 0
        if is_admitted:
            self.manager.reserve(context)
            assert self.manager.num_free_blocks >= headroom
        assert self.manager.num_free_blocks <= num_free_before

    @precondition(lambda self: self.claimed)
    @rule(
        choices=st.lists(context_choices, min_size=1, max_size=4),
        chunk=st.integers(1, 12),
        lookahead=st.integers(0, 5),
        token=st.integers(0, 3),
    )
    def step(self, choices: list[ContextChoice], chunk: int, lookahead: int, token: int) -> None:
        batch: list[TextContext] = []
        for context_id in dict.fromkeys(id(choice(self.claimed)) for choice in choices):
            context = next(other for other in self.claimed if id(other) == context_id)
            context.set_token_indices(active_idx=min(context.start_idx + chunk, context.end_idx))
            if self.reserve(context, lookahead):
                batch.append(context)
        if not batch:
            return
        self.check_written_blocks(batch)
        store_and_check_keys(self.manager, batch)
        for context in batch:
            context.update(token)
            self.manager.commit(context)
            assert context.committed_idx <= context.start_idx

    @precondition(lambda self: self.claimed)
    @rule(choice=context_choices, count=st.integers(1, 9), new_tokens=st.lists(st.integers(0, 2), max_size=6))
    def roll_back(self, choice: ContextChoice, count: int, new_tokens: list[int]) -> None:
        context = choice(self.claimed)
        if context.active_idx < context.end_idx:
            return
        context.rollback(min(count, context.active_idx - 1))
        for token in new_tokens:
            context.jump_ahead(token)

    @precondition(lambda self: self.claimed)
    @rule(choice=context_choices)
    def fork(self, choice: ContextChoice) -> None:
        parent = choice(self.claimed)
        if parent.active_idx < parent.end_idx:
            return
        child = text_context(parent.all_tokens.tolist(), cache_salt=parent.cache_salt)
        num_free_before = self.manager.num_free_blocks
        try:
            self.manager.fork(parent, child)
        except InsufficientBlocksError:
            assert self.manager.num_free_blocks == num_free_before == 0
            assert not child.is_assigned_to_cache
            return
        assert child.start_idx == parent.start_idx
        assert self.manager.num_free_blocks >= num_free_before - 1
        self.claimed.append(child)

    @precondition(lambda self: self.claimed)
    @rule(choice=context_choices, is_preempted=st.booleans())
    def release(self, choice: ContextChoice, is_preempted: bool) -> None:
        context = choice(self.claimed)
        self.claimed.remove(context)
        self.manager.release(context)
        num_free_before = self.manager.num_free_blocks
        self.manager.release(context)
        assert self.manager.num_free_blocks == num_free_before
        if is_preempted:
            context.reset()
            context.set_token_indices(active_idx=context.end_idx)
            self.waiting.append(context)

    @precondition(lambda self: self.waiting)
    @rule(choice=context_choices)
    def check_waits_for(self, choice: ContextChoice) -> None:
        context = choice(self.waiting)
        if self.manager.waits_for(context):
            assert self.claimed

    @invariant()
    def the_pool_is_consistent(self) -> None:
        self.manager.check_integrity()
        if not self.claimed:
            assert self.manager.num_free_blocks == self.manager.num_blocks
            assert not any(self.manager.waits_for(context) for context in self.waiting)

    def reserve(self, context: TextContext, lookahead: int) -> bool:
        for num_lookahead in (0, lookahead):  # after a rollback, the first reservation may move start_idx
            tables_before = block_tables(self.manager, context), self.manager.num_free_blocks
            try:
                self.manager.reserve(context, num_lookahead)
            except InsufficientBlocksError:
                if num_lookahead:
                    assert tables_before == (
                        block_tables(self.manager, context),
                        self.manager.num_free_blocks,
                    )
                return False
            tables_after = block_tables(self.manager, context), self.manager.num_free_blocks
            self.manager.reserve(context, num_lookahead)
            assert tables_after == (block_tables(self.manager, context), self.manager.num_free_blocks)
        return True

    def check_written_blocks(self, batch: list[TextContext]) -> None:
        """Check tables and slots. No token is written into a registered block or another context's block."""
        inputs = self.manager.inputs(batch)
        offsets = np.cumsum([0, *(context.active_length for context in batch)])
        assert inputs.lengths.tolist() == [context.active_idx for context in batch]
        for index, group in enumerate(inputs.groups):
            for row, context in enumerate(batch):
                slots = group.slots[offsets[row] : offsets[row + 1]].numpy()
                table = block_tables(self.manager, context)[index]
                padding = [0] * (group.block_tables.shape[1] - len(table))
                assert group.block_tables[row].tolist() == table + padding
                block_offsets = [
                    divmod(position, BLOCK_SIZE) for position in range(context.start_idx, context.active_idx)
                ]
                assert slots.tolist() == [
                    table[column] * BLOCK_SIZE + offset for column, offset in block_offsets
                ]
                written_blocks = set((slots // BLOCK_SIZE).tolist())
                assert 0 not in written_blocks
                for other_context in self.claimed:
                    if other_context is not context:
                        assert not written_blocks & set(block_tables(self.manager, other_context)[index])
                assert all(self.manager._pools[index]._digests[block] is None for block in written_blocks)


class OperationsWithAWindow(Operations):
    windows = (None, 6)
    num_blocks = (14, 9)


class OperationsWithWindowsOnly(Operations):
    windows = (3, 9)
    num_blocks = (8, 10)


class OperationsWithoutPrefixCaching(Operations):
    windows = (None, 6)
    num_blocks = (14, 14)
    caching = False


@pytest.mark.parametrize(
    "operations",
    [Operations, OperationsWithAWindow, OperationsWithWindowsOnly, OperationsWithoutPrefixCaching],
)
def test_random_operations_keep_the_cache_consistent(operations: type[Operations]) -> None:
    run_state_machine_as_test(
        operations, settings=settings(max_examples=num_examples(20), stateful_step_count=30, deadline=None)
    )

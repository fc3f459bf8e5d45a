"""The input tensors of a forward, compared with values computed row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.pipeline_steps import make_context, open_pipeline
from support.random_draws import num_examples

from penstock.architectures.llama import tiny_config

SMALL_COUNTS = st.integers(0, 3)
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 4), SMALL_COUNTS, st.integers(1, 5)), min_size=1
)
"""Each sequence has four numbers: computed tokens, tokens to compute, drafts, and requested logit rows."""
DECODE_STEPS = st.lists(st.tuples(st.integers(0, 9), st.just(1), st.just(0), st.just(1)), min_size=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_pipeline(write_checkpoint(tmp_path_factory.mktemp("inputs"), tiny_config())).model


@settings(max_examples=num_examples(60), deadline=None)
@given(sequences=st.one_of(SEQUENCES, DECODE_STEPS))
def test_input_tensors_equal_values_computed_row_by_row(
    model: Any, sequences: list[tuple[int, int, int, int]]
) -> None:
    contexts, drafts, tokens, positions = [], [], [], []
    row_offsets, logit_rows, logit_offsets = [0], [], [0]
    for number, (num_computed, num_active, num_drafts, num_logits) in enumerate(sequences):
        context_tokens = [(7 * number + position) % 50 for position in range(num_computed + num_active)]
        context = make_context(context_tokens)
        context.set_token_indices(start_idx=num_computed)
        contexts.append(context)
        drafts.append([60 + position for position in range(num_drafts)])
        rows = context_tokens[num_computed:] + drafts[-1]
        tokens += rows
        positions += range(num_computed, num_computed + len(rows))
        row_offsets.append(row_offsets[-1] + len(rows))
        logit_rows += range(row_offsets[-1] - min(num_logits, len(rows)), row_offsets[-1])
        logit_offsets.append(len(logit_rows))
    num_logit_rows = [num_logits for *_, num_logits in sequences]
    inputs = model.prepare_initial_token_inputs([contexts], None, num_logit_rows, drafts=drafts)
    expected = {
        "tokens": (tokens, torch.int64),
        "positions": (positions, torch.int64),
        "row_offsets": (row_offsets, torch.int32),
        "logit_rows": (logit_rows, torch.int64),
        "logit_offsets": (logit_offsets, torch.int64),
    }
    for name, (values, dtype) in expected.items():
        tensor = getattr(inputs, name)
        assert (tensor.tolist(), tensor.dtype) == (values, dtype), name
        assert tensor.is_contiguous()
    assert inputs.drafts == tuple(map(len, drafts))
    pointers = {getattr(inputs, name).untyped_storage().data_ptr() for name in expected}
    assert len(pointers) == len(expected), "a recorded step identifies each input by its memory address"

"""Compiled steps of encoders: the result of a short single input is bit-equal to the eager step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoders import ENCODERS, encode_all, open_encoder, save_encoder

from penstock.architectures.registry import SupportedArchitecture
from penstock.kernels.cpu.graphs import CpuGraphCompiler
from penstock.pipelines.embeddings import EmbeddingsPipeline

UNCOMPILED_FAMILIES = ("mpnet",)
"""Families whose steps run eagerly, because the attention bias is not the result of an operation."""


def random_inputs(length: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(length)
    return [rng.integers(3, 130, length) for _ in range(count)]


def compute_token_vectors(
    pipeline: EmbeddingsPipeline, inputs: list[np.ndarray], **fields: Any
) -> list[np.ndarray]:
    """Return the vectors of all tokens of several inputs, computed one input at a time."""
    result = []
    for tokens in inputs:
        [response] = encode_all(pipeline, [tokens], outputs=("multi_vector",), **fields)
        assert response.multi_vector is not None
        result.append(response.multi_vector)
    return result


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("architecture", ENCODERS, ids=lambda architecture: architecture.name)
def test_compiled_steps_are_bit_equal_to_eager_steps(
    architecture: SupportedArchitecture, encoding: str, tmp_path: Path
) -> None:
    save_encoder(architecture, tmp_path, "")
    pipeline = open_encoder(tmp_path, quantization_encoding=encoding)
    session = pipeline.session
    for length in (1, 7, 128):
        inputs = random_inputs(length, 3)
        session.use_graphs = False
        all_eager_vectors = compute_token_vectors(pipeline, inputs)
        session.use_graphs = True
        # The first run of a length is eager. The second run records the step.
        compute_token_vectors(pipeline, inputs)
        all_compiled_vectors = compute_token_vectors(pipeline, inputs)
        assert session.graph_status.startswith(
            "eager" if architecture.name in UNCOMPILED_FAMILIES else "compiled"
        )
        for eager_vectors, compiled_vectors in zip(all_eager_vectors, all_compiled_vectors, strict=True):
            assert np.array_equal(eager_vectors, compiled_vectors)


@pytest.fixture
def bert(tmp_path: Path) -> EmbeddingsPipeline:
    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == "bert")
    save_encoder(architecture, tmp_path, "")
    return open_encoder(tmp_path)


def test_token_types_are_inputs_of_a_compiled_step(bert: EmbeddingsPipeline) -> None:
    [tokens] = random_inputs(12, 1)
    types = [None, np.arange(12) % 2, np.zeros(12, np.int64), np.arange(12) // 6]
    bert.session.use_graphs = False
    eager_vectors = [
        compute_token_vectors(bert, [tokens], token_type_ids=token_types)[0] for token_types in types
    ]
    bert.session.use_graphs = True
    for _ in range(3):
        compiled_vectors = [
            compute_token_vectors(bert, [tokens], token_type_ids=token_types)[0] for token_types in types
        ]
        assert all(map(np.array_equal, eager_vectors, compiled_vectors))
    assert bert.session.graph_status.startswith("compiled")
    assert np.array_equal(compiled_vectors[0], compiled_vectors[2])
    assert not np.allclose(compiled_vectors[1], compiled_vectors[3])


def test_long_inputs_and_batches_are_not_compiled(
    bert: EmbeddingsPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuGraphCompiler, "max_rows", 64)
    for inputs, reason in (
        (random_inputs(65, 1), "more than 64 rows"),
        (random_inputs(5, 2), "several inputs"),
    ):
        for _ in range(3):
            encode_all(bert, inputs)
            assert bert.session.graph_status == f"eager: {reason}"

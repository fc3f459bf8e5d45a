"""`EmbeddingsPipeline` alone and in a scheduler: outputs, options, refused requests, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.encoders import embeddings_context, encode_all, open_encoder
from support.random_draws import num_examples
from support.tiny_embedder import (
    HIDDEN,
    LAYERS,
    POSITIONS,
    TOKENS,
    write_tiny_adapter,
    write_tiny_embedder,
)

from penstock.assembly import load_scheduler
from penstock.config import PipelineConfig
from penstock.errors import (
    InputError,
    InsufficientMemoryError,
    TaskMismatchError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import EmbeddingsContext, TextContext, TextGenerationStatus
from penstock.pipelines.embeddings import EmbeddingsPipeline
from penstock.scheduler import Scheduler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_embedder(tmp_path_factory.mktemp("embedder"), matryoshka_dimensions=[4, 8])


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> EmbeddingsPipeline:
    return open_encoder(folder, max_batch_input_tokens=24, max_batch_size=4)


def random_inputs(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, len(TOKENS), length) for length in lengths]


def load_scheduler_with(folder: Path, pipeline: EmbeddingsPipeline, **options: Any) -> Scheduler[Any, Any]:
    return load_scheduler(PipelineConfig.from_flat({"model_path": str(folder)}), pipeline, **options)


def submit(scheduler: Scheduler[Any, Any], inputs: list[np.ndarray]) -> list[EmbeddingsContext]:
    contexts = [embeddings_context(tokens, str(i)) for i, tokens in enumerate(inputs)]
    for context in contexts:
        scheduler.submit(context)
    return contexts


def run(scheduler: Scheduler[Any, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Run all steps. Return the outputs, and (number of inputs, number of tokens) of each step."""
    outputs: dict[str, Any] = {}
    steps = []
    while scheduler.has_work:
        outputs |= scheduler.step()
        steps.append(scheduler.last_batch)
    return outputs, steps


@settings(max_examples=num_examples(15))
@given(lengths=st.lists(st.integers(1, POSITIONS), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_outputs_of_any_schedule_are_bit_equal_to_single_inputs(
    pipeline: EmbeddingsPipeline, folder: Path, lengths: list[int], seed: int
) -> None:
    inputs = random_inputs(lengths, seed)
    scheduler = load_scheduler_with(folder, pipeline)
    contexts = submit(scheduler, inputs)
    outputs, steps = run(scheduler)
    assert not scheduler.failures
    assert sum(count for count, _ in steps) == len(inputs)
    for count, num_tokens in steps:
        assert count <= 4
        assert num_tokens <= 24 or count == 1, "an input that exceeds the budget runs alone"
    for i, context in enumerate(contexts):
        assert context.status is TextGenerationStatus.END_OF_SEQUENCE
        [single_response] = encode_all(pipeline, [inputs[i]])
        assert np.array_equal(outputs[str(i)].embeddings, single_response.embeddings)


def test_memory_is_planned_for_the_longest_input(
    folder: Path, pipeline: EmbeddingsPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pipeline.memory_plan
    assert (plan.max_length, plan.max_batch_input_tokens) == (POSITIONS, 24)
    larger_plan = open_encoder(folder, max_batch_input_tokens=POSITIONS, max_batch_size=4).memory_plan
    assert plan.activation_size == larger_plan.activation_size
    shorter_plan = open_encoder(
        folder, max_batch_input_tokens=24, max_batch_size=4, max_length=30
    ).memory_plan
    assert shorter_plan.activation_size < plan.activation_size
    monkeypatch.setattr("penstock.host.limits.memory", lambda: (1 << 30, plan.weights_size + 1000))
    with pytest.raises(InsufficientMemoryError, match="activations"):
        open_encoder(folder, max_batch_input_tokens=1)


def test_contexts_of_another_task_are_refused(pipeline: EmbeddingsPipeline) -> None:
    context = TextContext(request_id="1", prompt="a", tokens=np.array([5]), max_length=9)
    for call in (lambda: pipeline.ready(context), lambda: pipeline.execute({"1": context})):  # type: ignore
        with pytest.raises(TaskMismatchError, match="a TextContext, is a request of another task"):
            call()


def test_outputs_that_the_model_lacks_are_refused(pipeline: EmbeddingsPipeline, tmp_path: Path) -> None:
    assert pipeline.outputs == ("dense", "multi_vector")
    with pytest.raises(UnsupportedFeatureError, match=r"the output scores.*computes dense, multi_vector"):
        pipeline.ready(embeddings_context([5], outputs=("scores",)))
    classifier = open_encoder(write_tiny_embedder(tmp_path, labels=2))
    assert classifier.outputs == ("scores",)
    with pytest.raises(UnsupportedFeatureError, match=r"the output dense.*computes scores"):
        classifier.ready(embeddings_context([5], outputs=("dense",)))


def test_options_change_the_output(pipeline: EmbeddingsPipeline) -> None:
    [tokens] = random_inputs([9])
    [plain_response] = encode_all(pipeline, [tokens], normalize=False)
    [normalized_response] = encode_all(pipeline, [tokens])
    assert np.linalg.norm(normalized_response.embeddings) == pytest.approx(1)
    expected = plain_response.embeddings / np.linalg.norm(plain_response.embeddings)
    np.testing.assert_allclose(normalized_response.embeddings, expected, atol=1e-6)
    [truncated_response] = encode_all(pipeline, [tokens], dimensions=8)
    assert truncated_response.embeddings.shape == (8,)
    assert np.linalg.norm(truncated_response.embeddings) == pytest.approx(1), (
        "the vector is normalized after truncation"
    )
    [vector_response] = encode_all(
        pipeline, [tokens], outputs=("multi_vector", "dense"), num_unpooled_tokens=2
    )
    assert vector_response.multi_vector is not None
    assert vector_response.multi_vector.shape == (7, HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(vector_response.multi_vector, axis=1), 1, atol=1e-5)
    [pooled_response] = encode_all(pipeline, [tokens], num_unpooled_tokens=2)
    assert np.array_equal(vector_response.embeddings, pooled_response.embeddings)
    assert not np.allclose(pooled_response.embeddings, normalized_response.embeddings)
    for pooling in ("cls", "max"):
        [other_response] = encode_all(pipeline, [tokens], pooling=pooling)
        assert not np.allclose(other_response.embeddings, normalized_response.embeddings)
    with pytest.raises(InputError, match="dimensions must be one of 4, 8, 32, was 5"):
        pipeline.ready(embeddings_context(tokens, dimensions=5))


def test_each_context_of_a_batch_has_its_own_options(pipeline: EmbeddingsPipeline) -> None:
    [tokens] = random_inputs([9])
    options: list[dict[str, Any]] = [
        {},
        {"normalize": False},
        {"dimensions": 8},
        {"dimensions": 4, "normalize": False},
    ]
    batch = {
        str(i): embeddings_context(tokens, str(i), **context_options)
        for i, context_options in enumerate(options)
    }
    for response, context_options in zip(pipeline.encode(batch).values(), options, strict=True):
        [single_response] = encode_all(pipeline, [tokens], **context_options)
        assert np.array_equal(response.embeddings, single_response.embeddings)
        assert response.embeddings.shape == (context_options.get("dimensions", HIDDEN),)


def test_an_input_that_fails_does_not_affect_other_inputs(
    folder: Path, pipeline: EmbeddingsPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs([3, 4, 5, 2])
    expected = encode_all(pipeline, inputs)
    prepare_inputs = pipeline.model.prepare_initial_token_inputs

    def fail_on_bad_input(batches: Any, *args: Any) -> Any:
        if any(context.request_id == "2" for context in batches[0]):
            raise RuntimeError("this input fails")
        return prepare_inputs(batches, *args)

    monkeypatch.setattr(pipeline.model, "prepare_initial_token_inputs", fail_on_bad_input)
    scheduler = load_scheduler_with(folder, pipeline, isolates_faults=True)
    submit(scheduler, inputs)
    outputs, _ = run(scheduler)
    assert list(scheduler.failures) == ["2"]
    assert sorted(outputs) == ["0", "1", "3"]
    for name, output in outputs.items():
        assert np.array_equal(output.embeddings, expected[int(name)].embeddings)


def test_cancelled_inputs_are_not_computed(folder: Path, pipeline: EmbeddingsPipeline) -> None:
    scheduler = load_scheduler_with(folder, pipeline)
    submit(scheduler, random_inputs([20, 20, 20]))
    scheduler.cancel("1")
    scheduler.cancel("absent")
    outputs, steps = run(scheduler)
    assert sorted(outputs) == ["0", "2"]
    assert [count for count, _ in steps if count] == [1, 1]


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint with the adapter merged into its weights."""
    tensors, merged_tensors = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}.attention.self.query"
        a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        merged_tensors[f"{name}.weight"] = merged_tensors[f"{name}.weight"] + 2 * b @ a
    write_tiny_embedder(folder)
    save_file(merged_tensors, folder / "model.safetensors")
    return folder


def test_outputs_with_an_adapter_equal_those_with_merged_weights(
    folder: Path, pipeline: EmbeddingsPipeline, tmp_path: Path
) -> None:
    adapter = write_tiny_adapter(tmp_path / "adapter", seed=3)
    merged_pipeline = open_encoder(write_merged(tmp_path / "merged", folder, adapter))
    adapted_pipeline = open_encoder(folder, lora=(f"a={adapter}",))
    inputs = random_inputs([9, 5])
    batch = {
        "0": embeddings_context(inputs[0], "0", adapter="a"),
        "1": embeddings_context(inputs[1], "1"),
    }
    assert all(adapted_pipeline.ready(context) for context in batch.values())
    outputs = adapted_pipeline.encode(batch)
    [expected] = encode_all(merged_pipeline, inputs[:1])
    [first_plain_response, second_plain_response] = encode_all(pipeline, inputs)
    np.testing.assert_allclose(outputs["0"].embeddings, expected.embeddings, atol=1e-5)
    assert not np.allclose(outputs["0"].embeddings, first_plain_response.embeddings, atol=1e-2)
    np.testing.assert_allclose(outputs["1"].embeddings, second_plain_response.embeddings, atol=1e-6)

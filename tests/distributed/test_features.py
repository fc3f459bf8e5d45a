"""Features with tensor parallelism: encodings, uneven shapes, choices, drafts, beams and adapters."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import write_adapter
from support.checkpoints import write_checkpoint
from support.memory_pages import can_populate_pages
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits
from support.rank_pair import RankPair
from support.tiny_embedder import write_tiny_embedder
from support.tiny_llm import write_tiny_llm

from penstock.architectures.llama import tiny_config
from penstock.errors import ConfigError
from penstock.llm import LLM
from penstock.llm.beam_search import BeamOptions, search
from penstock.pipelines.core import SamplingParams
from penstock.pipelines.core.choices import choice_contexts
from penstock.pipelines.speculative.ngram import NGramProposer
from penstock.pipelines.text_generation import TextGenerationPipeline

PROMPT = random_tokens(20, 250, seed=1)


def compute_logits(pipeline: Any, **fields: Any) -> torch.Tensor:
    vocabulary = int(pipeline.model.huggingface_config.vocabulary_size)
    context = make_context([token % vocabulary for token in PROMPT], **fields)
    (logits,) = step_logits(pipeline, [context])
    pipeline.release(context)
    return logits


def assert_close(rank_pair: RankPair, checkpoint: Path, tolerance: float, **settings: Any) -> None:
    """Check that the logits of two ranks are close to those of one process.

    The root mean square error is at most ``tolerance`` times the standard deviation of the logits.
    """
    pipeline = open_pipeline(checkpoint, **settings)
    expected = compute_logits(pipeline)
    del pipeline
    gc.collect()
    with rank_pair.open(checkpoint, **settings) as sharded_pipeline:
        error = compute_logits(sharded_pipeline) - expected
    assert float(error.square().mean().sqrt() / expected.std()) <= tolerance


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama whose linear layers have several quantization groups of 32 inputs."""
    return write_tiny_llm(
        tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=224, num_attention_heads=4
    )


@pytest.mark.parametrize(
    ("encoding", "tolerance"), [("bfloat16", 0.02), ("int8", 0.05), ("int4", 0.06), ("int5", 0.06)]
)
def test_logits_in_bfloat16_and_quantized_encodings_are_close_to_one_process(
    rank_pair: RankPair, wide_checkpoint: Path, encoding: str, tolerance: float
) -> None:
    assert_close(rank_pair, wide_checkpoint, tolerance, quantization_encoding=encoding)


@pytest.mark.skipif(not can_populate_pages(), reason="MADV_POPULATE_WRITE needs Linux 5.14")
def test_the_preparation_while_idle_allocates_pages_of_each_layer_of_the_cache(
    rank_pair: RankPair, wide_checkpoint: Path
) -> None:
    with rank_pair.open(wide_checkpoint) as pipeline:
        storage, populate_calls = pipeline.kv.storage, []
        announce = storage.on_populate
        storage.on_populate = lambda *arguments: (populate_calls.append(arguments), announce(*arguments))
        while pipeline.prepare_next():
            pass
        assert [layer for layer, *_ in populate_calls] == [0, 1]
        logits = compute_logits(pipeline)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"num_key_value_heads": 1}, id="fewer kv heads than ranks"),
        pytest.param(
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 41},
            id="shards of different sizes",
        ),
        pytest.param({"tie_word_embeddings": True, "vocab_size": 267}, id="tied head"),
    ],
)
def test_logits_of_uneven_shapes_are_close_to_one_process(
    rank_pair: RankPair, tmp_path: Path, config: dict[str, Any]
) -> None:
    assert_close(rank_pair, write_tiny_llm(tmp_path, **config), 1e-5)


def test_logits_of_the_reference_kernels_with_an_int8_cache_are_close_to_one_process(
    rank_pair: RankPair, wide_checkpoint: Path
) -> None:
    assert_close(rank_pair, wide_checkpoint, 0.02, kernels="reference", kv_cache_dtype="int8")


def test_tokens_of_sampled_choices_with_drafts_equal_one_process(
    rank_pair: RankPair, tiny_checkpoint: Path
) -> None:
    """The text is sampled, with several choices and n-gram drafts."""

    def run(pipeline: TextGenerationPipeline) -> list[list[int]]:
        pipeline.proposer = NGramProposer(1, 3)
        params = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.1)
        context = make_context([5, 6, 7, 8] * 5, 40, sampling_params=params)
        return generate_tokens(pipeline, choice_contexts(context, 3))

    pipeline = open_pipeline(tiny_checkpoint)
    expected = run(pipeline)
    with rank_pair.open(tiny_checkpoint) as sharded_pipeline:
        assert run(sharded_pipeline) == expected
        assert sharded_pipeline.speculation_stats == pipeline.speculation_stats
    assert pipeline.speculation_stats.num_proposed > 0


def test_beams_equal_one_process(rank_pair: RankPair, tiny_checkpoint: Path) -> None:
    """If a beam forks a context within a block, every rank copies the block."""

    def run(pipeline: Any) -> list[tuple[list[int], float]]:
        options = BeamOptions(num_beams=4, num_return_sequences=4)
        ((_, beams),) = search(pipeline, [make_context(PROMPT[:9], 6)], options, 8, 512)
        return [(list(beam.token_ids), round(float(beam.score), 3)) for beam in beams]

    expected = run(open_pipeline(tiny_checkpoint))
    with rank_pair.open(tiny_checkpoint) as sharded_pipeline:
        assert run(sharded_pipeline) == expected


def test_logits_with_adapters_are_close_to_one_process(rank_pair: RankPair, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "base", tiny_config())
    adapters = [
        f"{name}={write_adapter(checkpoint, tmp_path / name, seed, r=3)}"
        for seed, name in ((1, "a"), (2, "b"))
    ]
    settings: dict[str, Any] = {"lora": tuple(adapters), "max_loras": 1}

    def run(pipeline: Any) -> list[torch.Tensor]:
        return [compute_logits(pipeline, adapter=name) for name in ("a", "b", None, "a")]

    expected = run(open_pipeline(checkpoint, **settings))
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    with rank_pair.open(checkpoint, **settings) as sharded_pipeline:
        for actual, reference in zip(run(sharded_pipeline), expected, strict=True):
            torch.testing.assert_close(actual, reference, atol=1e-3, rtol=0)


def test_a_rank_holds_only_its_shard(rank_pair: RankPair, tiny_checkpoint: Path) -> None:
    full_model = open_pipeline(tiny_checkpoint).model
    with rank_pair.open(tiny_checkpoint) as sharded_pipeline:
        model: Any = sharded_pipeline.model
        block = model.network.blocks[1]
        layers = (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)
        shapes = [(layer.packed.out_features, layer.packed.in_features) for layer in layers]
        assert shapes == [(32, 32), (32, 16), (48, 32), (32, 24)]
        assert model.network.embedding.table.shape == (128, 32)
        assert model.network.head.linear.packed.out_features == 128
        assert model.kv_cache_spec.groups[0].kv_heads == 1
        assert model.memory_plan.weights_size < 0.6 * full_model.memory_plan.weights_size
        assert [buffer.numel() for buffer in model.signal_buffers] == [2 << 20] * 2
    assert full_model.signal_buffers == []


def test_unsupported_models_and_settings_are_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_llm(tmp_path)
    with pytest.raises(
        ConfigError,
        match="a draft model is not supported with a model that is divided among several processes",
    ):
        LLM(checkpoint, tensor_parallel_size=2, draft_model_path=str(checkpoint))
    with pytest.raises(ConfigError, match="expert_parallel: needs tensor_parallel_size to be 2 or more"):
        LLM(checkpoint, expert_parallel=True)
    with pytest.raises(ConfigError, match="collective_transport: needs tensor_parallel_size"):
        LLM(checkpoint, collective_transport="torch")
    embedder = write_tiny_embedder(tmp_path / "embedder")
    with pytest.raises(ConfigError, match="cannot be divided among processes"):
        LLM(embedder, tensor_parallel_size=2)

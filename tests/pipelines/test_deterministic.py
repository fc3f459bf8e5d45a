"""Logits of deterministic pipelines are bit-equal for any schedule, in each instruction set and encoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.pipeline_steps import (
    append_token,
    chunked_logits,
    generate_tokens,
    make_context,
    open_pipeline,
    random_tokens,
    step_logits,
)
from support.random_draws import num_examples

from penstock.architectures.llama import tiny_config
from penstock.errors import ConfigError
from penstock.kernels import ENCODINGS
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.pipelines.speculative import FixedDraftLength, NGramProposer

PROMPT = random_tokens(150, 130, seed=1)
"""The prompt has more rows than a compiled step and than a tile of any kernel."""

KERNELS = {ops.isa: ops for ops in variants()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config() | sizes)


@pytest.fixture(params=[name for name in ENCODINGS.names if ENCODINGS[name].is_deterministic])
def encoding(request: pytest.FixtureRequest) -> str:
    encoding: str = request.param
    return encoding


@pytest.fixture(params=KERNELS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def kernels(request: pytest.FixtureRequest) -> CpuOps:
    return KERNELS[request.param]


@pytest.fixture
def pipeline(checkpoint: Path, encoding: str, kernels: CpuOps) -> TextGenerationPipeline:
    pipeline_ = open_pipeline(
        checkpoint, deterministic=True, quantization_encoding=encoding, kv_cache_block_size=16
    )
    vars(pipeline_.session)["ops"] = kernels
    return pipeline_


@pytest.fixture
def one_forward_logits(pipeline: TextGenerationPipeline) -> torch.Tensor:
    """Return the logits ``[T, V]`` after each prompt token, computed in one forward."""
    return chunked_logits(pipeline, uncached_context(), [len(PROMPT)])


def uncached_context(tokens: Sequence[int] = PROMPT) -> TextContext:
    """Return a context that reuses no cached blocks, so that all its tokens are computed."""
    return make_context(tokens, log_probabilities_echo=True)


@pytest.mark.matrix(strength=1)
@pytest.mark.usefixtures("_restore_num_threads")
def test_logits_are_bit_equal_in_any_chunks_and_batches(
    pipeline: TextGenerationPipeline, one_forward_logits: torch.Tensor
) -> None:
    @settings(max_examples=num_examples(5), phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        boundaries=st.sets(st.integers(1, len(PROMPT) - 1), max_size=4),
        other_lengths=st.lists(st.integers(1, 90), max_size=3),
        num_threads=st.sampled_from([1, 2]),
    )
    def check_chunks(boundaries: set[int], other_lengths: list[int], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        edges = [0, *sorted(boundaries), len(PROMPT)]
        chunks = [end - start for start, end in pairwise(edges)]
        assert torch.equal(
            chunked_logits(pipeline, uncached_context(), chunks, other_lengths), one_forward_logits
        )

    check_chunks()


@pytest.mark.matrix(strength=1)
def test_logits_of_decode_steps_and_verification_are_bit_equal(
    pipeline: TextGenerationPipeline, one_forward_logits: torch.Tensor
) -> None:
    decoded_logits = chunked_logits(pipeline, uncached_context(), [130] + [1] * 20, [5])
    assert torch.equal(decoded_logits, one_forward_logits)
    assert torch.equal(
        chunked_logits(pipeline, uncached_context(), [130, 9, 1, 10], [3, 8]), one_forward_logits
    )


@pytest.mark.matrix(strength=1)
def test_logits_after_a_cached_prefix_are_bit_equal(
    pipeline: TextGenerationPipeline, one_forward_logits: torch.Tensor
) -> None:
    cached_context, context = make_context(PROMPT), make_context(PROMPT[:100] + PROMPT[:30])
    step_logits(pipeline, [cached_context])
    append_token(pipeline, cached_context, 0)
    (logits_after_prefix,) = step_logits(pipeline, [context])
    assert context.num_cached_tokens == 96
    expected = chunked_logits(pipeline, uncached_context(PROMPT[:100] + PROMPT[:30]), [130])
    assert torch.equal(logits_after_prefix, expected[96:])
    assert torch.equal(expected[:100], one_forward_logits[:100])


@pytest.mark.matrix(strength=1)
def test_logits_after_a_preemption_are_bit_equal(pipeline: TextGenerationPipeline) -> None:
    new_tokens = random_tokens(20, 130, seed=2)
    full_logits = chunked_logits(pipeline, uncached_context(PROMPT + new_tokens), [170])
    context = uncached_context()
    step_logits(pipeline, [context])
    for token in new_tokens:
        append_token(pipeline, context, token)
    pipeline.release(context)
    context.reset()
    assert torch.equal(chunked_logits(pipeline, context, [63, 107]), full_logits)


@pytest.mark.matrix(strength=1)
def test_tokens_with_speculation_equal_plain_tokens(pipeline: TextGenerationPipeline) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.95, seed=3)
    prompts = [PROMPT[:7] * 6, PROMPT[:40], PROMPT[3:30] * 3]
    plain_tokens = [
        generate_tokens(pipeline, [make_context(p, 60, sampling_params=sampling)])[0] for p in prompts
    ]
    pipeline.proposer, pipeline.draft_lengths = NGramProposer(), FixedDraftLength(6)
    assert (
        generate_tokens(pipeline, [make_context(p, 60, sampling_params=sampling) for p in prompts])
        == plain_tokens
    )
    assert pipeline.speculation_stats.num_proposed > 0


def test_a_float16_checkpoint_runs_in_bfloat16_on_the_cpu_and_is_refused_on_a_gpu(
    checkpoint: Path, tmp_path: Path
) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "float16"}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    cpu_pipeline = open_pipeline(tmp_path, quantization_encoding=None, deterministic=True)
    assert cpu_pipeline.config.model.encoding == "bfloat16"
    gpu_values = {"model_path": str(tmp_path), "devices": "gpu", "deterministic": True}
    with pytest.raises(ConfigError, match=r"deterministic: needs .* int4, is 'float16'"):
        PipelineConfig.from_flat(gpu_values).check_determinism()

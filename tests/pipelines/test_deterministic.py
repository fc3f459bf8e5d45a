"""Deterministic pipelines on all sets of C++ kernels, in every encoding: logits compared by bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.random_draws import examples
from support.running import (
    context_of,
    feed,
    generate,
    logits_of_tokens,
    open_pipeline,
    random_tokens,
    step_logits,
)

from penstock.architectures.llama import tiny_config
from penstock.errors import ConfigError
from penstock.kernels import ENCODINGS
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.pipelines.speculative import FixedDraftLength, NGramProposer

PROMPT = random_tokens(150, 130, seed=1)
"""More rows than a recorded step has, and than a tile of any kernel."""

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
    opened = open_pipeline(
        checkpoint, deterministic=True, quantization_encoding=encoding, kv_cache_block_size=16
    )
    vars(opened.session)["ops"] = kernels
    return opened


@pytest.fixture
def alone(pipeline: TextGenerationPipeline) -> torch.Tensor:
    """The logits behind each token of the prompt, computed at once."""
    return logits_of_tokens(pipeline, uncached_context(), [len(PROMPT)])


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def uncached_context(tokens: Sequence[int] = PROMPT) -> TextContext:
    """A context that reads no cached blocks, so that all of its rows are computed."""
    return context_of(tokens, log_probabilities_echo=True)


@pytest.mark.matrix(strength=1)
@pytest.mark.usefixtures("_threads")
def test_bits_are_equal_for_any_chunks_and_any_batch(
    pipeline: TextGenerationPipeline, alone: torch.Tensor
) -> None:
    @settings(max_examples=examples(5), phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(
        cuts=st.sets(st.integers(1, len(PROMPT) - 1), max_size=4),
        others=st.lists(st.integers(1, 90), max_size=3),
        threads=st.sampled_from([1, 2]),
    )
    def check(cuts: set[int], others: list[int], threads: int) -> None:
        torch.set_num_threads(threads)
        borders = [0, *sorted(cuts), len(PROMPT)]
        chunks = [end - begin for begin, end in pairwise(borders)]
        assert torch.equal(logits_of_tokens(pipeline, uncached_context(), chunks, others), alone)

    check()


@pytest.mark.matrix(strength=1)
def test_token_by_token_and_verified_together(pipeline: TextGenerationPipeline, alone: torch.Tensor) -> None:
    decoded = logits_of_tokens(pipeline, uncached_context(), [130] + [1] * 20, [5])
    assert torch.equal(decoded, alone)
    assert torch.equal(logits_of_tokens(pipeline, uncached_context(), [130, 9, 1, 10], [3, 8]), alone)


@pytest.mark.matrix(strength=1)
def test_behind_a_cached_prefix(pipeline: TextGenerationPipeline, alone: torch.Tensor) -> None:
    first, again = context_of(PROMPT), context_of(PROMPT[:100] + PROMPT[:30])
    step_logits(pipeline, [first])
    feed(pipeline, first, 0)
    (behind,) = step_logits(pipeline, [again])
    assert again.num_cached_tokens == 96
    expected = logits_of_tokens(pipeline, uncached_context(PROMPT[:100] + PROMPT[:30]), [130])
    assert torch.equal(behind, expected[96:])
    assert torch.equal(expected[:100], alone[:100])


@pytest.mark.matrix(strength=1)
def test_after_a_preemption(pipeline: TextGenerationPipeline) -> None:
    new = random_tokens(20, 130, seed=2)
    whole = logits_of_tokens(pipeline, uncached_context(PROMPT + new), [170])
    context = uncached_context()
    step_logits(pipeline, [context])
    for token in new:
        feed(pipeline, context, token)
    pipeline.release(context)
    context.reset()
    assert torch.equal(logits_of_tokens(pipeline, context, [63, 107]), whole)


@pytest.mark.matrix(strength=1)
def test_speculated_text_is_plain_text(pipeline: TextGenerationPipeline) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.95, seed=3)
    prompts = [PROMPT[:7] * 6, PROMPT[:40], PROMPT[3:30] * 3]
    plain = [generate(pipeline, [context_of(p, 60, sampling_params=sampling)])[0] for p in prompts]
    pipeline.proposer, pipeline.draft_lengths = NGramProposer(), FixedDraftLength(6)
    assert generate(pipeline, [context_of(p, 60, sampling_params=sampling) for p in prompts]) == plain
    assert pipeline.speculation_stats.num_proposed > 0


def test_float16_is_computed_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "float16"}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    on_cpu = open_pipeline(tmp_path, quantization_encoding=None, deterministic=True)
    assert on_cpu.config.model.encoding == "bfloat16"
    on_gpu = {"model_path": str(tmp_path), "devices": "gpu", "deterministic": True}
    with pytest.raises(ConfigError, match=r"deterministic: needs .* int4, is 'float16'"):
        PipelineConfig.from_flat(on_gpu).check_determinism()

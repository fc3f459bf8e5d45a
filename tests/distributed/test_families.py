"""Models on two ranks compute the logits and text of one process, for all families that can be divided."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, write_checkpoint
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits
from support.rank_pair import RankPair

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines import TextGenerationPipeline

DEFAULT_FAMILIES = ("llama", "gpt2", "mixtral", "gemma2")
"""Families that are tested by default: Llama, and families with fused and transposed weights (GPT-2), with
experts (Mixtral), and with norms before and after each layer (Gemma 2)."""
SHARDABLE_FAMILIES = [
    candidate for candidate in DECODERS if candidate.load_pipeline_model().supports_tensor_parallelism
]


def family_params(*default_names: str) -> list[Any]:
    """Return the families as parameters. Families that are not in ``default_names`` are marked as slow."""
    return [
        pytest.param(family, id=family.name, marks=() if family.name in default_names else pytest.mark.slow)
        for family in SHARDABLE_FAMILIES
    ]


@pytest.fixture(scope="module")
def write_family_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[SupportedArchitecture], Path]:
    """Return a function that writes the checkpoint of a family once."""
    folders: dict[str, Path] = {}

    def write(family: SupportedArchitecture) -> Path:
        if family.name not in folders:
            assert family.tiny_config is not None
            folders[family.name] = write_checkpoint(
                tmp_path_factory.mktemp(family.name), family.tiny_config()
            )
        return folders[family.name]

    return write


def run_batches(pipeline: TextGenerationPipeline) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the logits of two prompts, and the greedy tokens of two other prompts, generated twice."""
    vocabulary = int(pipeline.model.huggingface_config.vocabulary_size)
    contexts = [make_context(random_tokens(count, vocabulary, seed=count)) for count in (11, 3)]
    logits = torch.cat(step_logits(pipeline, contexts))
    for context in contexts:
        pipeline.release(context)
    prompts = [random_tokens(count, vocabulary, seed=count) for count in (5, 18)]
    texts = generate_tokens(pipeline, [make_context(prompt, 8) for prompt in prompts])
    # Decode steps of this shape are now compiled. Several steps run as one call on all ranks.
    texts += generate_tokens(pipeline, [make_context(prompt, 8) for prompt in prompts], num_steps=4)
    return logits, texts


def compare_with_one_process(
    rank_pair: RankPair, checkpoint: Path, tolerance: float = 1e-4, **settings: Any
) -> None:
    """Check that two ranks and one process have nearly the same logits, and in float32 the same text.

    The logits differ by at most ``tolerance`` times their standard deviation, or ``tolerance`` if that is
    larger.
    """
    single_process_settings = {name: value for name, value in settings.items() if name != "expert_parallel"}
    pipeline = open_pipeline(checkpoint, **single_process_settings)
    logits, texts = run_batches(pipeline)
    del pipeline
    gc.collect()
    with rank_pair.open(checkpoint, **settings) as sharded_pipeline:
        sharded_logits, sharded_texts = run_batches(sharded_pipeline)
    scale = max(1.0, float(logits.std()))
    torch.testing.assert_close(sharded_logits, logits, atol=tolerance * scale, rtol=0)
    if settings.get("quantization_encoding", "float32") == "float32":
        assert sharded_texts == texts


@pytest.mark.parametrize("family", family_params(*DEFAULT_FAMILIES))
def test_logits_and_text_of_two_ranks_equal_one_process(
    rank_pair: RankPair,
    write_family_checkpoint: Callable[[SupportedArchitecture], Path],
    family: SupportedArchitecture,
) -> None:
    compare_with_one_process(rank_pair, write_family_checkpoint(family))


EXPERT_FAMILIES = [
    architecture
    for architecture in SHARDABLE_FAMILIES
    if architecture.name in ("mixtral", "qwen3_moe", "gpt_oss")
]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            architecture,
            id=architecture.name,
            marks=() if architecture.name == "mixtral" else pytest.mark.slow,
        )
        for architecture in EXPERT_FAMILIES
    ],
)
@pytest.mark.parametrize("kernels", ["best", "reference"])
def test_logits_with_expert_parallelism_equal_one_process(
    rank_pair: RankPair,
    write_family_checkpoint: Callable[[SupportedArchitecture], Path],
    family: SupportedArchitecture,
    kernels: str,
) -> None:
    settings: dict[str, Any] = {} if kernels == "best" else {"kernels": kernels}
    compare_with_one_process(rank_pair, write_family_checkpoint(family), expert_parallel=True, **settings)

"""Models on two ranks generate the text of one process, for every family that generates text."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, write_checkpoint
from support.rank_pair import RankPair
from support.running import context_of, generate, open_pipeline, random_tokens, step_logits

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines import TextGenerationPipeline

DEFAULT = ("llama", "gpt2", "mixtral", "gemma2")
"""The families of the default run: plain, fused and transposed, with experts, with norms around layers."""
DIVISIBLE = [one for one in DECODERS if one.load_pipeline_model().is_divisible]


def families(*default: str) -> list[Any]:
    """Return the families as parameters; those that are not named are slow."""
    return [
        pytest.param(one, id=one.name, marks=() if one.name in default else pytest.mark.slow)
        for one in DIVISIBLE
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SupportedArchitecture], Path]:
    """Return the checkpoint of a family; it is written once."""
    folders: dict[str, Path] = {}

    def write(family: SupportedArchitecture) -> Path:
        if family.name not in folders:
            assert family.tiny_config is not None
            folders[family.name] = write_checkpoint(
                tmp_path_factory.mktemp(family.name), family.tiny_config()
            )
        return folders[family.name]

    return write


def run(pipeline: TextGenerationPipeline) -> tuple[torch.Tensor, list[list[int]]]:
    """Return logits of a batch of two prompts, and the greedy text of two others."""
    vocabulary = int(pipeline.model.huggingface_config.vocabulary_size)
    contexts = [context_of(random_tokens(count, vocabulary, seed=count)) for count in (11, 3)]
    logits = torch.cat(step_logits(pipeline, contexts))
    for context in contexts:
        pipeline.release(context)
    prompts = [random_tokens(count, vocabulary, seed=count) for count in (5, 18)]
    texts = generate(pipeline, [context_of(prompt, 8) for prompt in prompts])
    # Decode steps of this shape are compiled now: several of them run as one call, on all ranks.
    texts += generate(pipeline, [context_of(prompt, 8) for prompt in prompts], num_steps=4)
    return logits, texts


def compare(pair: RankPair, checkpoint: Path, tolerance: float = 1e-4, **flat: Any) -> None:
    """Check the logits of two ranks against those of one process, and in float32 the text, too."""
    one_process = {name: value for name, value in flat.items() if name != "expert_parallel"}
    pipeline = open_pipeline(checkpoint, **one_process)
    logits, texts = run(pipeline)
    del pipeline
    gc.collect()
    with pair.open(checkpoint, **flat) as divided:
        divided_logits, divided_texts = run(divided)
    spread = max(1.0, float(logits.std()))
    torch.testing.assert_close(divided_logits, logits, atol=tolerance * spread, rtol=0)
    if flat.get("quantization_encoding", "float32") == "float32":
        assert divided_texts == texts


@pytest.mark.parametrize("family", families(*DEFAULT))
def test_greedy_text_of_one_process(
    pair: RankPair, written: Callable[[SupportedArchitecture], Path], family: SupportedArchitecture
) -> None:
    compare(pair, written(family))


EXPERTS = [one for one in DIVISIBLE if one.name in ("mixtral", "qwen3_moe", "gpt_oss")]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.name, marks=() if one.name == "mixtral" else pytest.mark.slow)
        for one in EXPERTS
    ],
)
@pytest.mark.parametrize("kernels", ["best", "reference"])
def test_whole_experts(
    pair: RankPair,
    written: Callable[[SupportedArchitecture], Path],
    family: SupportedArchitecture,
    kernels: str,
) -> None:
    flat: dict[str, Any] = {} if kernels == "best" else {"kernels": kernels}
    compare(pair, written(family), expert_parallel=True, **flat)

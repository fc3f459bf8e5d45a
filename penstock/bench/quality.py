"""Compares a model in one weight encoding with the same model in another: perplexity, divergence, agreement.

    LLM in float32 -> sampled texts -> log probabilities of each text in each encoding -> Quality

The texts are sampled from the model itself, so the result does not depend on a choice of texts. On these
texts, the unquantized model has the lowest expected perplexity, and quantization errors increase the
perplexity. To measure the quality of a model itself, use texts from other sources.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.llm import LLM
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.weights import Weights
from penstock.weights.safetensors import SINGLE_FILE


@dataclass(frozen=True, slots=True)
class Quality:
    """The comparison of a model with a reference model over all predicted tokens of several texts."""

    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from the distributions of the reference, in nats."""
    agreement: float
    """Fraction of positions where model and reference have the same most probable token."""
    num_tokens: int


def sample_texts(llm: LLM, start: int, *, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Sample ``count`` texts of ``length`` tokens at temperature 1, without top-k or top-p.

    Args:
        llm: the model, in the reference encoding.
        start: the first token of each text.
        count: the number of texts.
        length: number of tokens of each text, including the first.
        seed: the seed of the first text. Text i has the seed ``seed + i``.
    """
    params = [
        SamplingParams(
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            seed=seed + number,
            max_new_tokens=length - 1,
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(count)
    ]
    outputs = llm.generate([[start]] * count, params, use_tqdm=False)
    return [[start, *(int(token) for token in output.token_ids)] for output in outputs]


def log_probs_of_texts(llm: LLM, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield the log probabilities ``[T, V]`` of each text: row t is for the token after token t."""
    pipeline = llm.pipeline
    for text in texts:
        context = TextContext(
            prompt=list(text), max_length=len(text) + 1, tokens=np.array(text, dtype=np.int64)
        )
        pipeline.kv.claim(context)
        pipeline.kv.reserve(context)
        logits = pipeline.runner.forward([context], [context.active_length])
        assert len(logits) == len(text), (
            "open the model with enable_prefix_caching=False: cached tokens have no logits"
        )
        yield logits.float().log_softmax(-1).cpu()
        pipeline.release(context)


def compare(reference: LLM, candidate: LLM, texts: Sequence[Sequence[int]]) -> Quality:
    """Compare ``candidate`` with ``reference`` on ``texts``."""
    comparisons = compare_all({"reference": reference, "candidate": candidate}, texts, ["reference"])
    return comparisons["candidate"]["reference"]


def compare_all(
    models: Mapping[str, LLM], texts: Sequence[Sequence[int]], references: Sequence[str]
) -> dict[str, dict[str, Quality]]:
    """Compare each model with each reference. Each model computes each text once.

    Returns:
        Name of a model -> name of a reference -> the comparison.
    """
    sums_by_pair = {(name, reference): _QualitySums() for name in models for reference in references}
    for text, *log_probs_of_models in zip(
        texts, *(log_probs_of_texts(llm, texts) for llm in models.values()), strict=True
    ):
        targets = torch.tensor(text[1:])
        log_probs_by_model = {
            name: log_probs[:-1] for name, log_probs in zip(models, log_probs_of_models, strict=True)
        }
        for (name, reference), sums in sums_by_pair.items():
            sums.add(log_probs_by_model[reference], log_probs_by_model[name], targets)
    return {
        name: {reference: sums_by_pair[name, reference].quality() for reference in references}
        for name in models
    }


@dataclass(slots=True)
class _QualitySums:
    """Sums over the predicted tokens of all texts."""

    total_loss: float = 0.0
    total_divergence: float = 0.0
    num_agreeing: int = 0
    num_tokens: int = 0

    def add(
        self,
        reference_log_probs: Tensor,  # [T, V]
        log_probs: Tensor,  # [T, V]
        targets: Tensor,  # [T]
    ) -> None:
        differences = reference_log_probs - log_probs
        self.total_loss -= float(log_probs.gather(1, targets[:, None]).double().sum())
        self.total_divergence += float((reference_log_probs.exp() * differences).double().sum())
        self.num_agreeing += int((reference_log_probs.argmax(-1) == log_probs.argmax(-1)).sum())
        self.num_tokens += len(targets)

    def quality(self) -> Quality:
        return Quality(
            perplexity=math.exp(self.total_loss / self.num_tokens),
            divergence=self.total_divergence / self.num_tokens,
            agreement=self.num_agreeing / self.num_tokens,
            num_tokens=self.num_tokens,
        )


def write_rounded(checkpoint: Path, folder: Path) -> None:
    """Write a copy of a checkpoint with its linear weights ``[out, in]`` rounded to 4 bits.

    The copy is a baseline: a 4-bit encoding should have a lower divergence than the copy. The weights of each
    group of 32 inputs are rounded to multiples of 1/7 of the largest magnitude in the group. The LM head, the
    embedding table, routers, tensors that are not matrices, and activations are not rounded.
    """
    weights = Weights.open(checkpoint)
    tensors = {}
    for name in weights.names:
        tensor = weights.tensor(name, weights.shape(name))
        is_linear = tensor.dim() == 2 and not any(part in name for part in _UNROUNDED_NAMES)
        tensors[name] = _round_to_4_bits(tensor.float()) if is_linear else tensor.clone()
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, folder)
    save_file(tensors, folder / SINGLE_FILE)


_GROUP_SIZE = 32
_UNROUNDED_NAMES = ("embed", "lm_head", ".gate.", ".router.")


def _round_to_4_bits(weight: Tensor) -> Tensor:
    padded = F.pad(weight, (0, -weight.shape[1] % _GROUP_SIZE))
    groups = padded.view(len(weight), -1, _GROUP_SIZE)
    scales = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12)
    return ((groups / scales).round() * scales).flatten(1)[:, : weight.shape[1]].contiguous()

"""LongRoPE across ``original_max_position_embeddings``: tokens equal those of a full recomputation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import DECODERS, oracle, oracle_greedy, write_checkpoint
from support.running import context_of, generate, open_pipeline, random_tokens
from support.tiny_llm import write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.pipelines.core import TextContext
from penstock.scheduler import Scheduler

pytestmark = pytest.mark.models

LIMIT = 40
PROMPT = random_tokens(30, 130, seed=3)
NEW = 16
"""Number of generated tokens; the text crosses the limit."""
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 7.5]}


def config_of(family: str) -> dict[str, Any]:
    (architecture,) = (one for one in DECODERS if one.name == family)
    assert architecture.tiny_config is not None
    rope = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": LIMIT}
    changed = {
        "original_max_position_embeddings": LIMIT,
        "rope_scaling": rope | {"type": "longrope"},
        "sliding_window": 24,
    }
    if family == "llama":
        changed = {"rope_parameters": rope | {"rope_theta": 500.0}, "rope_theta": None}
    config = architecture.tiny_config() | changed
    return {key: value for key, value in config.items() if value is not None}


@pytest.fixture(scope="module", params=["phi3", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llm(tmp_path_factory.mktemp(request.param))  # for its tokenizer
    return write_checkpoint(folder, config_of(request.param))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return oracle(checkpoint)


def recomputed(reference: Any, text: list[int], start: int) -> list[float]:
    """Return the log probability of each token from ``start`` on, by a forward of all previous tokens."""
    found = []
    with torch.inference_mode():
        for end in range(start, len(text)):
            logits = reference(torch.tensor([text[:end]]), use_cache=False).logits[0, -1]
            found.append(float(logits.float().log_softmax(-1)[text[end]]))
    return found


def assert_scores(ours: list[float], expected: list[float]) -> None:
    assert len(ours) == len(expected)
    worst = max(abs(one - other) for one, other in zip(ours, expected, strict=True))
    assert worst < 1e-3, (worst, [round(a - b, 3) for a, b in zip(ours, expected, strict=True)])


def run(pipeline: Any, contexts: list[TextContext], num_steps: int = 1, **limits: int) -> list[list[float]]:
    """Run contexts as a scheduler does, and return the log probabilities of each answer."""
    scheduler = Scheduler(pipeline, max_batch_size=8, **limits)
    scores: dict[str, list[float]] = {}
    for context in contexts:
        scheduler.submit(context)
        scores[context.request_id] = []
    while scheduler.has_work:
        for request_id, response in scheduler.step(num_steps).items():
            scores[request_id] += [
                token.log_probabilities.token_log_probabilities[-1]
                for token in response.tokens
                if token.log_probabilities is not None
            ]
        assert not scheduler.failures
    return list(scores.values())


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=-1, seed=seed)


@pytest.mark.parametrize("budget", [512, 16])
def test_generated_tokens_are_scored_as_in_a_recomputation(
    checkpoint: Path, reference: Any, budget: int
) -> None:
    """The batch has texts below the limit, texts that cross it and texts that begin beyond it; one prompt is
    chunked."""
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    lengths = (5, 30, 31, LIMIT - 1, LIMIT, LIMIT + 1, 60)
    contexts = [
        context_of(random_tokens(n, 130, seed=n), NEW, log_probabilities=1, sampling_params=sampled(n))
        for n in lengths
    ]
    scores = run(pipeline, contexts, max_batch_input_tokens=budget, min_chunk_size=4)
    for context, ours, length in zip(contexts, scores, lengths, strict=True):
        assert_scores(ours, recomputed(reference, context.all_tokens.tolist(), length))


def test_scored_text_agrees_with_generated_text(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    context = context_of(PROMPT, NEW, log_probabilities=1, sampling_params=sampled(1))
    (generated,) = run(pipeline, [context])
    text = context.all_tokens.tolist()
    echo = context_of(text, 1, log_probabilities=1, log_probabilities_echo=True)
    logs = pipeline.execute({"echo": echo})["echo"].tokens[0].log_probabilities
    assert logs is not None
    beyond = LIMIT + 1  # the first token that was sampled with the long factors
    scored = logs.token_log_probabilities[:-1][beyond - 1 :]
    assert_scores(generated[beyond - len(PROMPT) :], scored)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
def test_greedy_text_is_that_of_a_recomputation(checkpoint: Path, reference: Any, num_steps: int) -> None:
    expected = greedy(reference, PROMPT, NEW)
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16)
    assert generate(pipeline, [context_of(PROMPT, NEW)], num_steps) == [expected]
    context = context_of(PROMPT, NEW)
    run(pipeline, [context], num_steps, max_batch_input_tokens=16)
    assert context.generated_tokens.tolist() == expected
    if "phi3" in str(checkpoint):  # which recomputes its cache in transformers, too
        assert oracle_greedy(reference, PROMPT, NEW) == expected


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    with torch.inference_mode():
        while len(text) < len(prompt) + count:
            text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("caching", [True, False])
def test_prefixes_are_shared_only_within_a_regime(checkpoint: Path, reference: Any, caching: bool) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, enable_prefix_caching=caching)
    long = random_tokens(60, 130, seed=3)
    assert long[:30] == PROMPT
    texts = [long[:30], long, long[:35], long[:50], long[:30]]
    cached = []
    for number, text in enumerate(texts):
        params = sampled(number)
        context = context_of(text, NEW, log_probabilities=1, sampling_params=params)
        (ours,) = run(pipeline, [context])
        assert_scores(ours, recomputed(reference, context.all_tokens.tolist(), len(text)))
        cached.append(context.num_cached_tokens)
    assert cached == ([0, 16, 16, 48, 16] if caching else [0] * 5)


def test_drafts_do_not_cross_the_limit(checkpoint: Path, reference: Any) -> None:
    """Both n-gram drafts and a draft model are tested; the draft model has a separate limit."""
    prompt = [*PROMPT[:8]] * 4
    expected = greedy(reference, prompt, NEW)
    for options in ({"speculative_method": "ngram"}, {"draft_model_path": str(checkpoint)}):
        with LLM(
            str(checkpoint),
            quantization_encoding="float32",
            kv_cache_block_size=16,
            num_speculative_tokens=6,
            adaptive_speculation=False,
            **options,
        ) as llm:
            params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.token_ids == expected
            stats = llm.pipeline.speculation_stats
            if "draft_model_path" in options:  # the same model: its drafts are right where its cache is
                assert stats.num_accepted == stats.num_proposed > NEW // 2


def test_beams_cross_the_limit(checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(
        str(checkpoint),
        quantization_encoding="float32",
        kv_cache_block_size=16,
        max_batch_size=6,
        max_batch_input_tokens=16,
    ) as llm:
        rows: list[int] = []
        execute = llm.pipeline.model.execute

        def counted(inputs: Any) -> Any:
            rows.append(len(inputs.tokens))
            return execute(inputs)

        monkeypatch.setattr(llm.pipeline.model, "execute", counted)
        options: dict[str, Any] = {"num_beams": 6, "num_return_sequences": 6, "max_new_tokens": 14}
        beams = llm.beam_search(PROMPT, ignore_eos=True, use_tqdm=False, **options)
    assert max(rows) == 16, "the cache is computed again in chunks"
    for beam in beams:
        expected = recomputed(reference, [*PROMPT, *beam.token_ids], len(PROMPT))
        assert beam.score == pytest.approx(sum(expected) / 14, abs=1e-4)


def test_several_scored_answers_cross_the_limit(checkpoint: Path, reference: Any) -> None:
    """Log probabilities of the prompt are returned once, although the first answer computes the prompt
    twice."""
    params = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=5, ignore_eos=True)
    with LLM(str(checkpoint), quantization_encoding="float32", kv_cache_block_size=16) as llm:
        outputs = llm.generate(PROMPT, params, logprobs=1, prompt_logprobs=1, n=3, use_tqdm=False)
    assert len(outputs) == 3
    short = recomputed(reference, PROMPT, 1)
    for output in outputs:
        assert output.log_probabilities is not None
        assert output.prompt_log_probabilities is not None
        assert_scores(output.prompt_log_probabilities.token_log_probabilities, short)
        text = [*PROMPT, *output.token_ids]
        expected = recomputed(reference, text, len(PROMPT))
        assert_scores(output.log_probabilities.token_log_probabilities, expected)


def test_equal_factors_do_not_switch(tmp_path: Path) -> None:
    config = config_of("llama")
    config["rope_parameters"] |= {"long_factor": FACTORS["short_factor"]}
    pipeline = open_pipeline(write_checkpoint(tmp_path, config))
    assert pipeline.model.kv_cache_spec is not None
    assert pipeline.model.kv_cache_spec.key_limits == ()
    network: Any = pipeline.model
    assert not network.network.length_dependent
    assert math.isclose(network.network.rotaries[0].config.max_positions, LIMIT)

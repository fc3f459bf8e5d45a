"""Models with linear attention: states of answers and beams, of captured steps and of failed steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import load_in_transformers, make_tiny_config, transformers_logits, write_checkpoint
from support.lazy_queue import register_lazy
from support.pipeline_steps import (
    append_token,
    generate_tokens,
    make_context,
    open_pipeline,
    random_tokens,
    step_logits,
)
from support.tiny_llm import VOCABULARY, write_tiny_llm

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError
from penstock.kernels import Ops, cpu
from penstock.kernels.operations import UnrecordableStepError
from penstock.pipelines.core import Grammar

PROMPT = random_tokens(37, 130, seed=11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llm(tmp_path_factory.mktemp("hybrid"))  # writes the tokenizer
    return write_checkpoint(folder, make_tiny_config("qwen3_5_text") | {"vocab_size": VOCABULARY})


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_in_transformers(checkpoint)


def open_llm(checkpoint: Path, **config: Any) -> LLM:
    return LLM(str(checkpoint), quantization_encoding="float32", kv_cache_block_size=16, **config)


def score(reference: Any, tokens: list[int], start: int) -> float:
    """Return the sum of the log probabilities of the tokens from ``start`` on, in transformers."""
    rows = transformers_logits(reference, tokens)[start - 1 : -1].log_softmax(-1)
    return float(rows.gather(1, torch.tensor(tokens[start:])[:, None]).sum())


def test_several_answers_are_reproducible_and_the_first_equals_a_single_request(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, top_k=0, seed=4, max_new_tokens=12, ignore_eos=True)
    with open_llm(checkpoint, max_batch_size=4) as llm:
        answers = llm.generate(PROMPT, params, n=4, use_tqdm=False)
        single_answer = llm.generate(PROMPT, params, use_tqdm=False)[0]
        assert answers[0].token_ids == single_answer.token_ids
        assert len({tuple(answer.token_ids) for answer in answers}) == 4
        repeated_answers = llm.generate(PROMPT, params, n=4, use_tqdm=False)
    assert [answer.token_ids for answer in repeated_answers] == [answer.token_ids for answer in answers]


@pytest.mark.parametrize("num_beams", [3, 6])
def test_scores_of_beams_equal_transformers(checkpoint: Path, reference: Any, num_beams: int) -> None:
    with open_llm(checkpoint, max_batch_size=6) as llm:
        beams = llm.beam_search(
            PROMPT,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=10,
            ignore_eos=True,
            use_tqdm=False,
        )
    for beam in beams:
        expected = score(reference, [*PROMPT, *beam.token_ids], len(PROMPT)) / 10
        assert beam.score == pytest.approx(expected, abs=1e-4)


def test_forced_tokens_of_a_grammar_advance_the_states(checkpoint: Path, reference: Any) -> None:
    grammar = Grammar("regex", "(Berlin is a city|Paris is a town)[0-9]{3} and more[a-z]{2}")
    params = SamplingParams(max_new_tokens=40)
    with open_llm(checkpoint) as llm:
        (output,) = llm.generate(PROMPT, params, grammar=grammar, logprobs=0, use_tqdm=False)
        assert llm.pipeline.speculation_stats.num_forced > 10
    rows = output.log_probabilities
    assert rows is not None
    tokens = [*PROMPT, *output.token_ids]
    expected = transformers_logits(reference, tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, token, value in zip(expected, output.token_ids, rows.token_log_probabilities, strict=True):
        assert value == pytest.approx(float(row[token]), abs=3e-4)


@pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built")
def test_overlapped_steps_equal_synchronous_steps_and_save_states(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_lazy(monkeypatch)
    prompts = [[*PROMPT, *random_tokens(5 + 9 * i, VOCABULARY, seed=i)] for i in range(5)]
    params = SamplingParams(temperature=1.0, top_k=0, seed=2, max_new_tokens=9, ignore_eos=True)
    outputs = {}
    for kernels in ("cpu", "lazy"):
        with open_llm(checkpoint, kernels=kernels, max_batch_size=3, deterministic=True) as llm:
            assert (llm.pipeline.overlapped_steps is not None) == (kernels == "lazy")
            outputs[kernels] = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    for actual, expected in zip(outputs["lazy"], outputs["cpu"], strict=True):
        assert [output.token_ids for output in actual] == [output.token_ids for output in expected]
    assert sum(output.num_cached_tokens for output in outputs["lazy"][1]) >= 3 * 32


def test_a_step_that_cannot_be_captured_updates_the_states_once(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture updates the states before it fails, so they are restored before the step runs eagerly."""
    pipeline = open_pipeline(checkpoint, num_threads=1)
    graphs = pipeline.session.graphs
    if graphs is None:
        pytest.skip("has no compiler")
    captures: list[int] = []

    def capture(step: Any, inputs: Any) -> Any:
        captures.append(1)
        step(pipeline.session.ops, inputs)
        raise UnrecordableStepError("fails after the step")

    monkeypatch.setattr(graphs.compiler, "capture", capture)
    tokens = generate_tokens(pipeline, [make_context(PROMPT, 8)])[0]
    assert captures
    expected = transformers_logits(reference, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()


def test_a_failed_step_is_computed_again_from_the_first_token(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = open_pipeline(checkpoint, kernels="reference")
    context = make_context(PROMPT)
    step_logits(pipeline, [context])
    append_token(pipeline, context, 5)

    def fail(self: Ops, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("failed in the last layer")

    with monkeypatch.context() as patched:
        patched.setattr(type(pipeline.session.ops), "apply_gate", fail)
        with pytest.raises(RuntimeError, match="last layer"):
            step_logits(pipeline, [context])
    logits = step_logits(pipeline, [context])[0]
    assert len(logits) == len(PROMPT) + 1, "all tokens are computed again"
    expected = transformers_logits(reference, [*PROMPT, 5])
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("num_calls", [1, 4])
def test_a_failed_overlapped_step_runs_again_from_the_first_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """The states already include the tokens of the failed step, so all tokens are computed again."""
    register_lazy(monkeypatch)
    # Up to 8 decoding contexts would run several steps in one call, without overlap.
    prompts = [PROMPT[i:] for i in range(10)]
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    with open_llm(checkpoint, kernels="cpu", deterministic=True) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with open_llm(checkpoint, kernels="lazy", deterministic=True) as llm:
        steps = llm.pipeline.overlapped_steps
        assert steps is not None
        sample, calls = type(steps).sample, []

        def fail_once(self: Any, step: Any) -> Any:
            request_ids, host_tokens = sample(self, step), step.host_tokens

            def wait() -> Any:
                host_tokens.wait()
                raise RuntimeError("failed when the step was collected")

            calls.append(1)
            if len(calls) == num_calls:
                step.host_tokens = SimpleNamespace(wait=wait)
            return request_ids

        monkeypatch.setattr(type(steps), "sample", fail_once)
        actual = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.pipeline.kv.check_integrity()
    assert len(calls) > num_calls
    assert actual == expected


def test_states_of_a_failed_step_are_not_saved(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later step of the same context would otherwise commit states that were never computed."""
    pipeline = open_pipeline(checkpoint, kernels="reference", kv_cache_block_size=16, max_batch_size=1)
    context = make_context(PROMPT)

    def fail(self: Ops, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("failed before the states")

    with monkeypatch.context() as patched:
        patched.setattr(type(pipeline.session.ops), "short_convolution", fail)
        with pytest.raises(RuntimeError, match="before the states"):
            step_logits(pipeline, [context])
        pipeline.kv.check_integrity()
    step_logits(pipeline, [context])
    append_token(pipeline, context, 5)
    pipeline.kv.check_integrity()
    pipeline.release(context)
    new_context = make_context(PROMPT, 4)
    tokens = generate_tokens(pipeline, [new_context])[0]
    assert new_context.num_cached_tokens == 32
    expected = transformers_logits(reference, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()


def test_a_context_waits_for_the_states_of_an_equal_prompt(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, max_batch_size=3)
    first, second, other = make_context(PROMPT, 2), make_context(PROMPT, 2), make_context([1, *PROMPT], 2)
    pipeline.kv.claim(first)
    assert pipeline.kv.waits_for(second)
    assert not pipeline.kv.waits_for(other)
    longer = make_context([*PROMPT[:32], *PROMPT], 2)
    assert not pipeline.kv.waits_for(longer), "the state at the end of the common prefix is not saved"
    generate_tokens(pipeline, [first])
    generate_tokens(pipeline, [second])
    assert second.num_cached_tokens == 32


def test_contexts_wait_for_a_free_state(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, max_batch_size=2)
    contexts = [make_context(PROMPT[: 5 + i], 6) for i in range(3)]
    for context in contexts[:2]:
        pipeline.kv.claim(context)
    assert not pipeline.kv.admits(contexts[2])
    pipeline.release(contexts[0])
    assert pipeline.kv.admits(contexts[2])
    pipeline.release(contexts[1])


def test_prefixes_are_reused_up_to_saved_states(checkpoint: Path, reference: Any) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, max_batch_size=2)
    other = random_tokens(40, VOCABULARY, seed=8)

    def cached_tokens(prompt: list[int]) -> int:
        context = make_context(prompt, 3)
        tokens = generate_tokens(pipeline, [context])[0]
        expected = transformers_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1)
        assert tokens == expected.tolist()
        return context.num_cached_tokens

    prompt = [*PROMPT, *PROMPT]  # 74 tokens
    assert [cached_tokens(prompt) for _ in range(2)] == [0, 64], "the state at the last block boundary"
    # The state at the end of the common prefix is saved when the second prompt with this prefix is computed.
    assert [cached_tokens([*prompt[:40], *other[i:]]) for i in range(2)] == [0, 32]
    pipeline.kv.forget_prefixes()
    assert cached_tokens(prompt) == 0
    pipeline.kv.check_integrity()


def test_saved_states_are_evicted_in_the_order_of_their_use(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, max_batch_size=2)

    def cached_tokens(prompt: list[int]) -> int:
        context = make_context(prompt, 1)
        generate_tokens(pipeline, [context])
        return context.num_cached_tokens

    first, second, third = (random_tokens(20, VOCABULARY, seed=seed) for seed in range(3))
    assert [cached_tokens(prompt) for prompt in (first, second, first, third)] == [0, 0, 16, 0]
    assert [cached_tokens(prompt) for prompt in (first, second)] == [16, 0], "two states are saved"


def test_a_released_state_does_not_affect_the_next_context(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, max_batch_size=1)
    first = generate_tokens(pipeline, [make_context(PROMPT, 6)])
    generate_tokens(pipeline, [make_context(random_tokens(50, 130, seed=2), 6)])
    assert generate_tokens(pipeline, [make_context(PROMPT, 6)]) == first


def test_the_memory_plan_includes_the_states(checkpoint: Path) -> None:
    plans = [open_pipeline(checkpoint, max_batch_size=size).memory_plan for size in (1, 9)]
    spec = open_pipeline(checkpoint).model.kv_cache_spec
    assert spec is not None
    assert spec.states is not None
    # 3 layers: 3 inputs of 96 channels, and 4 states [8, 16], all float32
    assert spec.states.num_bytes == 3 * 4 * (3 * 96 + 4 * 8 * 16)
    block_sizes = spec.bytes_per_block(32)
    sizes = [
        plan.kv_cache_size - sum(n * size for n, size in zip(plan.num_blocks, block_sizes, strict=True))
        for plan in plans
    ]
    assert sizes == [2 * spec.states.num_bytes, 2 * 9 * spec.states.num_bytes], "states and saved states"


def test_speculation_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative_method: .* has recurrent states"):
        open_llm(checkpoint, speculative_method="ngram")
    with pytest.raises(ConfigError, match=r"draft_model_path: .* has recurrent states"):
        open_llm(write_tiny_llm(tmp_path), draft_model_path=str(checkpoint))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: must have layers of full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: 'sliding_attention' is not known"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be a list of 4 names"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads: 3 key heads do not divide 4 value heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be at least 2"),
    ],
)
def test_invalid_configurations_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        open_pipeline(tmp_path)

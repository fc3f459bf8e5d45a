"""`penstock.testing`: the fake tokenizer and pipeline behave like real ones, but have no model."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

import penstock.testing
from penstock.dtype import DType
from penstock.errors import InputError
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVGroup
from penstock.pipelines.core import PipelineTokenizer, SamplingParams, TextContext, TokenGeneratorRequest
from penstock.testing import FakePipeline, FakeTokenizer


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(penstock.testing).failed == 0


def test_importing_penstock_testing_loads_no_torch() -> None:
    code = "import sys, penstock.testing; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokens_are_bytes() -> None:
    tokenizer = FakeTokenizer()
    assert isinstance(tokenizer, PipelineTokenizer)
    text = "".join(map(chr, range(300))) + "漢🎉"
    assert tokenizer.encode_text(text).tolist() == list(text.encode())
    assert tokenizer.decode_ids(list(text.encode())) == text
    assert tokenizer.encode_text("a<|end|>").tolist() == [ord("a"), tokenizer.EOS]
    assert (tokenizer.eos, tokenizer.eos_token_ids, tokenizer.vocab_size) == (256, {256}, 257)


def test_the_chat_template_is_optional() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert FakeTokenizer().render_chat(messages) == "user: Hi\nassistant: "
    assert FakeTokenizer(template="{{ messages | length }}").render_chat(messages) == "1"
    assert not FakeTokenizer(template=None).has_chat_template


def test_tokens_do_not_depend_on_num_steps() -> None:
    outputs = {
        tuple(generate(FakePipeline(), build_context("Hello"), num_steps)) for num_steps in (1, 2, 5, 100)
    }
    assert len(outputs) == 1
    assert outputs != {tuple(generate(FakePipeline(), build_context("Hallo"), 1))}


def test_tokens_do_not_depend_on_prompt_chunks() -> None:
    context, pipeline = build_context("Hello"), FakePipeline()
    context.set_token_indices(active_idx=2)
    response = pipeline.execute({context.request_id: context}, num_steps=4)[context.request_id]
    assert (response.tokens, response.is_done) == ([], False)
    assert generate(pipeline, context, 3) == generate(FakePipeline(), build_context("Hello"), 3)
    assert [batch[context.request_id] for batch in pipeline.batches[:3]] == [2, 3, 1]


def test_each_request_gets_the_given_text_and_ends() -> None:
    pipeline = FakePipeline.saying("né")
    batch = {"a": build_context("x", request_id="a"), "b": build_context("yz", request_id="b")}
    responses = pipeline.execute(batch, num_steps=10)
    for response in responses.values():
        assert bytes(int(token.next_token) for token in response.tokens).decode() == "né"
        assert response.is_done
    assert pipeline.batches == [{"a": 1, "b": 2}, *[{"a": 1, "b": 1}] * 3]
    with pytest.raises(InputError, match="request a has ended"):
        pipeline.execute(batch)


def test_answering_computes_the_output_from_the_prompt() -> None:
    pipeline = FakePipeline.answering(lambda prompt: f"{prompt}!" * 2)
    for prompt in ("né", "x"):
        assert bytes(generate(pipeline, build_context(prompt), 5)).decode() == f"{prompt}!{prompt}!"


def test_minimum_and_maximum_lengths_are_respected_and_zero_steps_are_refused() -> None:
    assert (
        len(generate(FakePipeline(lambda context: ord("x")), build_context("Hello", max_new_tokens=7), 3))
        == 7
    )
    tokens = generate(FakePipeline.saying(""), build_context("Hello", min_new_tokens=4), 10)
    assert len(tokens) == 4
    with pytest.raises(InputError, match="num_steps must be at least 1, was 0"):
        FakePipeline().execute({}, num_steps=0)


def test_fake_log_probabilities_are_zero() -> None:
    request = TokenGeneratorRequest("1", 0, "fake", prompt="abc", logprobs=1, echo=True)
    context = FakeTokenizer().build_context(request)
    response = FakePipeline.saying("x").execute({"1": context}, num_steps=5)["1"]
    (token,) = response.tokens
    assert token.log_probabilities is not None
    assert token.log_probabilities.token_log_probabilities == [0.0, 0.0, 0.0]
    assert [list(top_entries) for top_entries in token.log_probabilities.top_log_probabilities] == [
        [ord("b")],
        [ord("c")],
        [ord("x")],
    ]


def test_blocks_of_a_real_cache_are_claimed_and_released() -> None:
    spec = KVCacheSpec((KVGroup((0,), kv_heads=1, head_dim=2, dtype=DType.float32),))
    kv = KVCacheManager(spec, (9,), 16)
    pipeline = FakePipeline(lambda context: ord("x"), kv=kv)
    context = build_context("a" * 20, max_new_tokens=20)
    pipeline.execute({context.request_id: context}, num_steps=15)
    assert context.is_assigned_to_cache
    assert kv.num_free_blocks == kv.num_blocks - 3
    pipeline.release(context)
    pipeline.release(context)
    assert not context.is_assigned_to_cache
    assert kv.num_free_blocks == kv.num_blocks
    kv.check_integrity()


def build_context(text: str, request_id: str = "1", **sampling: int) -> TextContext:
    params = SamplingParams(**{"max_new_tokens": 30, **sampling})  # type: ignore[arg-type]
    request = TokenGeneratorRequest(request_id, 0, "fake", prompt=text, sampling_params=params)
    return FakeTokenizer().build_context(request)


def generate(pipeline: FakePipeline, context: TextContext, num_steps: int) -> list[int]:
    tokens = []
    while not context.is_done:
        response = pipeline.execute({context.request_id: context}, num_steps)[context.request_id]
        tokens += [int(token.next_token) for token in response.tokens]
    pipeline.release(context)
    return tokens

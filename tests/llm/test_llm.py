"""`LLM`: batches, streams, limits, and its state after errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lazy_queue import register_lazy
from support.tiny_llm import EOS, MAX_LENGTH, write_tiny_llm

from penstock import LLM, GenerationOutput, SamplingParams
from penstock.config import PipelineConfig
from penstock.errors import (
    ConfigError,
    InputError,
    InsufficientBlocksError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from penstock.scheduler import OverlappedScheduler

pytestmark = pytest.mark.models

GREEDY = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared_llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_block_size=16, max_batch_size=4) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Return the LLM that the tests of this file share. Each test must leave no work and no used block."""
    yield shared_llm
    assert not shared_llm._scheduler.has_work
    shared_llm.pipeline.kv.check_integrity()
    assert shared_llm.pipeline.kv.num_free_blocks == shared_llm.pipeline.kv.num_blocks


def test_a_prompt_is_a_text_a_token_list_or_a_list_of_them(llm: LLM) -> None:
    tokens = llm.tokenizer.encode_text("Hello").tolist()
    (text_output,) = llm.generate("Hello", GREEDY)
    (ids_output,) = llm.generate(tokens, GREEDY)
    (array_output,) = llm.generate(np.array(tokens), GREEDY)
    list_outputs = llm.generate(["Hello", tokens], GREEDY)
    assert [output.token_ids for output in (ids_output, array_output, *list_outputs)] == [
        text_output.token_ids
    ] * 4
    assert text_output.prompt_token_ids == tokens
    assert (text_output.prompt, ids_output.prompt) == ("Hello", None)
    assert text_output.text == llm.tokenizer.decode_ids(text_output.token_ids)
    assert (text_output.finish_reason, text_output.num_generated_tokens) == ("length", 12)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_outputs_of_queued_prompts_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"Prompt {i}" * (1 + i % 3) for i in range(11)]
    params = [SamplingParams(max_new_tokens=1 + (7 * i) % 20) for i in range(11)]
    single_outputs = [
        llm.generate(prompt, sampling_params)[0]
        for prompt, sampling_params in zip(prompts, params, strict=True)
    ]
    batch_outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in batch_outputs] == [output.token_ids for output in single_outputs]
    assert [output.prompt for output in batch_outputs] == prompts
    assert [len(output.token_ids) for output in batch_outputs] == [
        sampling_params.max_new_tokens for sampling_params in params
    ]


def test_more_prompts_than_the_cache_holds_are_queued(model: Path) -> None:
    with LLM(str(model), kv_cache_block_size=16, kv_cache_memory=9 * 16 * 2 * 2 * 2 * 8 * 4) as small_llm:
        assert small_llm.pipeline.kv.num_blocks * 16 < 12 * 60
        outputs = small_llm.generate(["x" * 40] * 12, SamplingParams(max_new_tokens=20))
        assert len({tuple(output.token_ids) for output in outputs}) == 1
        assert len(outputs[0].token_ids) == 20


def test_cached_tokens_are_counted(llm: LLM) -> None:
    prompt = "A prompt of more than two blocks of sixteen tokens, sent twice"
    llm.generate(prompt, GREEDY)
    (repeated_output,) = llm.generate(prompt, GREEDY)
    assert repeated_output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_each_prompt_has_its_own_seed_by_default(llm: LLM) -> None:
    outputs = llm.generate(["Same prompt"] * 3)
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert all(len(output.prompt_token_ids + output.token_ids) <= MAX_LENGTH for output in outputs)


def test_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 7}')
    with LLM(str(folder)) as llm:
        first_output, second_output = llm.generate(["Same prompt"] * 2)
    assert first_output.token_ids == second_output.token_ids
    assert len(first_output.token_ids) == 7


def test_stop_strings_truncate_text_and_tokens(llm: LLM) -> None:
    (full_output,) = llm.generate("Hello", SamplingParams(max_new_tokens=40))
    stop = full_output.text[10:13]
    (truncated_output,) = llm.generate("Hello", SamplingParams(max_new_tokens=40, stop=[stop]))
    assert truncated_output.text == full_output.text[: full_output.text.index(stop)]
    assert truncated_output.token_ids == full_output.token_ids[: len(truncated_output.token_ids)]
    assert stop in llm.tokenizer.decode_ids(truncated_output.token_ids)
    assert stop not in llm.tokenizer.decode_ids(truncated_output.token_ids[:-1])
    assert (truncated_output.finish_reason, truncated_output.num_generated_tokens) == (
        "stop",
        len(truncated_output.token_ids),
    )


def test_an_end_token_is_counted_but_not_returned(llm: LLM) -> None:
    (full_output,) = llm.generate("Hello", GREEDY)
    end_token = full_output.token_ids[5]
    (truncated_output,) = llm.generate("Hello", SamplingParams(max_new_tokens=12, stop_token_ids=[end_token]))
    assert truncated_output.token_ids == full_output.token_ids[: full_output.token_ids.index(end_token)]
    assert truncated_output.text == llm.tokenizer.decode_ids(truncated_output.token_ids)
    assert (truncated_output.finish_reason, truncated_output.num_generated_tokens) == (
        "stop",
        len(truncated_output.token_ids) + 1,
    )


def test_several_steps_per_call_give_the_same_outputs(model: Path, llm: LLM) -> None:
    (full_output,) = llm.generate("Hello", SamplingParams(max_new_tokens=40))
    params = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, stop=[full_output.text[10:13]]),
        SamplingParams(max_new_tokens=40, stop_token_ids=[full_output.token_ids[5]]),
    ]
    with LLM(str(model), max_num_steps=8) as llm_with_steps:
        actual_outputs = llm_with_steps.generate(["Hello"] * 3, params)
    expected_outputs = llm.generate(["Hello"] * 3, params)
    for actual, expected in zip(actual_outputs, expected_outputs, strict=True):
        assert (actual.text, actual.token_ids, actual.finish_reason, actual.num_generated_tokens) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
            expected.num_generated_tokens,
        )


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_new_tokens=12, detokenize=False))
    assert output.text == ""
    assert output.token_ids == llm.generate("Hello", GREEDY)[0].token_ids


def test_chat_accepts_one_conversation_or_several(llm: LLM) -> None:
    conversation: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    (reply,) = llm.chat(conversation, GREEDY)
    several_outputs = llm.chat([conversation, conversation[1:]], GREEDY)
    assert reply.prompt == "<|start|>system: Be brief.<|end|><|start|>user: Hello<|end|><|start|>assistant: "
    assert several_outputs[0].token_ids == reply.token_ids
    assert several_outputs[1].prompt == reply.prompt.replace("<|start|>system: Be brief.<|end|>", "")
    assert reply.token_ids == llm.generate(reply.prompt, GREEDY)[0].token_ids


@pytest.mark.parametrize("messages", [None, 5, "Hello", [[]], ["Hello"], [{"content": "Hello"}]])
def test_malformed_messages_are_refused(messages: Any, llm: LLM) -> None:
    with pytest.raises(InputError, match="message"):
        llm.chat(messages, GREEDY)


def test_chat_passes_variables_to_the_template(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "Hi"}],
        GREEDY,
        chat_template_kwargs={"add_generation_prompt": False},
    )
    assert output.prompt == "<|start|>user: Hi<|end|>"


def test_joined_stream_chunks_equal_generate(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=30)
    stream = llm.stream("Hello", params)
    first_chunk = next(stream)
    assert 1 <= stream.num_tokens
    chunks = [first_chunk, *stream]
    assert stream.num_tokens == len(stream.output.token_ids)
    min_chunks = 3 if llm.pipeline.session.queue is None else 1  # on a GPU, one call may run all steps
    assert len(chunks) > min_chunks  # fewer chunks than tokens, because a call may run several steps
    assert "".join(chunks) == stream.output.text
    assert stream.output.token_ids == llm.generate("Hello", params)[0].token_ids


def test_a_closed_stream_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_new_tokens=30))
    next(stream)
    with pytest.raises(UnsupportedFeatureError, match="close its open stream"):
        llm.generate("Hello", GREEDY)
    stream.close()
    with pytest.raises(InputError, match="the stream has not ended"):
        _ = stream.output
    assert len(llm.generate("Hello", GREEDY)[0].token_ids) == 12


def test_a_stream_accepts_messages(llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    assert (
        "".join(llm.stream(messages=messages, sampling_params=GREEDY)) == llm.chat(messages, GREEDY)[0].text
    )
    with pytest.raises(InputError, match="either a prompt or messages"):
        llm.stream("Hello", messages=messages)


@pytest.mark.parametrize(
    ("prompts", "expected_message"),
    [
        ("", "the prompt is empty"),
        (["Hello", ""], "the prompt is empty"),
        (["Hello", []], "the prompt is empty"),
        (5, "not int"),
        (["Hello", None], "needs either a prompt or messages"),
        ([1.5, 2.5], "token 0 of the prompt is 1.5"),
        ([1, True], "token 1 of the prompt is True"),
        ([EOS + 3], f"is {EOS + 3}"),
        ([[1, -1]], "token 1 of the prompt is -1"),
        (b"Hello", "not bytes"),
        (["Hello", b"bytes"], "not bytes"),
        (bytearray(b"Hello"), "not bytearray"),
        ({"prompt": "Hello"}, "not dict"),
        ({"Hello"}, "not set"),
    ],
)
def test_invalid_prompts_are_refused(prompts: Any, expected_message: str, llm: LLM) -> None:
    with pytest.raises(InputError, match=expected_message):
        llm.generate(prompts, GREEDY)


def test_all_prompts_are_checked_before_one_of_them_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_batch_functions(llm, monkeypatch, lambda run: lambda *_: pytest.fail("a request ran"))
    with pytest.raises(PromptTooLongError) as caught:
        llm.generate(["fine", "x" * (MAX_LENGTH + 1)], GREEDY)
    assert (caught.value.num_tokens, caught.value.max_length) == (MAX_LENGTH + 1, MAX_LENGTH)
    assert caught.value.__notes__ == ["in prompt 2 of 2"]


def test_sampling_params_that_do_not_match_the_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="3 sampling_params were given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    for invalid in ({"temperature": 0}, [{"temperature": 0}], 5):
        with pytest.raises(InputError, match=r"must be SamplingParams, was (dict|int)"):
            llm.generate(["a"], invalid)  # type: ignore[arg-type]


def test_stop_strings_without_detokenizing_are_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="detokenize=True"):
        llm.generate("Hello", SamplingParams(stop=["x"], detokenize=False))


BatchFunction = Callable[..., Any]
"""A function of the pipeline that runs or launches a batch."""


def wrap_batch_functions(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[BatchFunction], BatchFunction]
) -> None:
    """Wrap the functions that run a batch: `execute`, and with overlapped steps also the launch of a step."""
    monkeypatch.setattr(llm.pipeline, "execute", wrap(llm.pipeline.execute))
    if isinstance(llm._scheduler, OverlappedScheduler):
        steps: Any = llm._scheduler._steps
        monkeypatch.setattr(steps, "launch", wrap(steps.launch))


@pytest.fixture(params=["default", "overlapped"])
def llm_variant(
    request: pytest.FixtureRequest, model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """Return the shared LLM (``default``), or an LLM that overlaps steps on any device (``overlapped``)."""
    if request.param == "default":
        yield llm
        return
    register_lazy(monkeypatch)
    with LLM(str(model), kernels="lazy", kv_cache_block_size=16, max_batch_size=4) as overlapped_llm:
        assert isinstance(overlapped_llm._scheduler, OverlappedScheduler)
        yield overlapped_llm
        assert not overlapped_llm._scheduler.has_work
        assert overlapped_llm.pipeline.kv.num_free_blocks == overlapped_llm.pipeline.kv.num_blocks


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_cancels_all_requests(
    error: type[BaseException], llm_variant: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_variant
    expected = [output.token_ids for output in llm.generate(["Hello"] * 9, GREEDY)]
    calls = []

    def fail_at_fourth_call(run: BatchFunction) -> BatchFunction:
        def wrapped(*args: Any) -> Any:
            calls.append(1)
            if len(calls) >= 4:
                raise error
            return run(*args)

        return wrapped

    with monkeypatch.context() as patch:
        wrap_batch_functions(llm, patch, fail_at_fourth_call)
        with pytest.raises(error):
            llm.generate(["Hello"] * 9, GREEDY)
    assert len(calls) >= 4
    assert not llm._scheduler.has_work
    assert llm.pipeline.kv.num_free_blocks == llm.pipeline.kv.num_blocks
    assert [output.token_ids for output in llm.generate(["Hello"] * 9, GREEDY)] == expected


def test_ctrl_c_waits_for_the_step_to_end(llm_variant: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_steps = []

    def interrupt_during_call(run: BatchFunction) -> BatchFunction:
        def wrapped(*args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            outputs = run(*args)
            finished_steps.append(1)
            return outputs

        return wrapped

    with monkeypatch.context() as patch:
        wrap_batch_functions(llm_variant, patch, interrupt_during_call)
        with pytest.raises(KeyboardInterrupt):
            llm_variant.generate(["Hello"] * 9, GREEDY)
    assert finished_steps == [1]


def test_a_failed_request_ends_the_batch(llm_variant: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_variant
    step = llm._scheduler.step

    def failing_step(num_steps: int = 1) -> Any:
        outputs = step(num_steps)
        llm._scheduler.failures |= {request_id: InsufficientBlocksError(3, 1, 2) for request_id in outputs}
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(llm._scheduler, "step", failing_step)
        with pytest.raises(InsufficientBlocksError):
            llm.generate(["Hello"] * 9, GREEDY)
    assert len(llm.generate(["Hello"] * 9, GREEDY)) == 9


def test_a_second_thread_is_refused(llm_variant: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_variant
    call_started, release_call = threading.Event(), threading.Event()

    def wait_in_call(run: BatchFunction) -> BatchFunction:
        def wrapped(*args: Any) -> Any:
            call_started.set()
            release_call.wait(10)
            return run(*args)

        return wrapped

    wrap_batch_functions(llm, monkeypatch, wait_in_call)
    outputs: list[GenerationOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("Hello", GREEDY)))
    thread.start()
    assert call_started.wait(10)
    with pytest.raises(UnsupportedFeatureError, match="one thread"):
        llm.generate("Hello", GREEDY)
    release_call.set()
    thread.join()
    assert len(outputs[0].token_ids) == 12


def test_zero_new_tokens_give_empty_outputs(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(max_new_tokens=0))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert output.num_generated_tokens == 0


def test_a_closed_llm_refuses_calls(model: Path) -> None:
    with LLM(str(model)) as llm:
        llm.generate("Hello", GREEDY)
    llm.close()
    with pytest.raises(InputError, match="closed"):
        llm.generate("Hello", GREEDY)


def test_an_error_with_an_open_stream_is_not_hidden(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM(str(model)) as llm:  # noqa: PT012
        for _ in llm.stream("Hello", GREEDY):
            1 / 0  # noqa: B018


def test_settings_are_passed_by_name_and_unknown_names_are_refused(model: Path) -> None:
    with LLM(str(model), max_length=40, max_batch_size=3) as llm:
        assert llm.pipeline.memory_plan.max_length == 40
        assert llm.pipeline.memory_plan.max_batch_size == 3
        assert len(llm.generate("Hello", SamplingParams(ignore_eos=True))[0].token_ids) == 35
    with pytest.raises(ConfigError, match="max_length"):
        LLM(str(model), max_lenght=40)


def test_from_config_accepts_a_complete_configuration(model: Path, llm: LLM) -> None:
    config = PipelineConfig.from_flat({"model_path": str(model)})
    with LLM.from_config(config) as configured_llm:
        assert configured_llm.config is config
        assert configured_llm.generate("Hello", GREEDY)[0].text == llm.generate("Hello", GREEDY)[0].text


def test_a_trained_model_generates_its_story(shared_data: Path) -> None:
    story = (
        ", there was a little girl named Lily. She loved to play outside in the park."
        " One day, she saw a big, red ball."
    )
    with LLM(str(shared_data / "models" / "stories260K")) as llm:
        (output,) = llm.generate("Once upon a time", SamplingParams(max_new_tokens=60))
    assert output.text.startswith(story)


def test_two_model_paths_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="model_path: is the first argument of LLM"):
        LLM(str(model), model_path=str(model))

"""Beam search: the tokens equal those of transformers, and the cache is free afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_logits
from support.pipeline_steps import make_context
from support.tiny_llm import EOS, MAX_LENGTH, write_tiny_llm

from penstock import LLM, GenerationOutput
from penstock.errors import InputError, InsufficientBlocksError, UnsupportedFeatureError
from penstock.llm.beam_search import BeamOptions, Hypothesis, _replace_last
from penstock.pipelines import TextTokenizer
from penstock.pipelines.core import TokenGeneratorRequest

pytestmark = pytest.mark.models

PROMPTS = ["Hello", "A", "What is longer than a block of sixteen tokens, by far?", "Hello there"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with several end tokens, so that beams end at many lengths."""
    return write_tiny_llm(
        tmp_path_factory.mktemp("models") / "tiny", seed=3, eos_token_id=[EOS, 60, 61, 62, 63]
    )


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_in_transformers(model)


@pytest.fixture(scope="module")
def shared_llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_block_size=16, max_batch_size=32, deterministic=True) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    shared_llm.pipeline.kv.check_integrity()
    assert shared_llm.pipeline.kv.num_free_blocks == shared_llm.pipeline.kv.num_blocks


def reference_beams(
    reference: Any, llm: LLM, prompt: str, end_ids: set[int], **options: Any
) -> list[tuple[Any, ...]]:
    """Return (tokens before the end token, whether there is one, score) of each beam of transformers."""
    tokens = torch.from_numpy(llm.tokenizer.encode_text(prompt))[None]
    transformers_output = reference.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for row, score in zip(
        transformers_output.sequences.tolist(), transformers_output.sequences_scores.tolist(), strict=True
    ):
        generated = row[tokens.shape[1] :]
        end = next((i for i, token in enumerate(generated) if token in end_ids), None)
        beams.append((generated[:end], end is not None, pytest.approx(score, rel=1e-4, abs=1e-4)))
    return beams


def beam_tuples(outputs: list[GenerationOutput]) -> list[tuple[Any, ...]]:
    return [(output.token_ids, output.finish_reason == "stop", output.score) for output in outputs]


@pytest.mark.matrix
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 2.5, 0.0, -0.5])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_beams_equal_those_of_transformers(
    num_beams: int, length_penalty: float, early_stopping: Any, llm: LLM, reference: Any
) -> None:
    options = {
        "num_beams": num_beams,
        "num_return_sequences": 2,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "max_new_tokens": 20,
    }
    outputs = llm.beam_search(PROMPTS, **options)
    assert [output.index for output in outputs] == [0, 1] * len(PROMPTS)
    end_ids = llm.tokenizer.eos_token_ids
    for i, prompt in enumerate(PROMPTS):
        expected_beams = reference_beams(reference, llm, prompt, end_ids, **options)
        assert beam_tuples(outputs[2 * i : 2 * i + 2]) == expected_beams
        assert outputs[2 * i].prompt == prompt


@pytest.mark.parametrize("seed", range(4))
def test_beams_of_models_with_two_end_tokens_equal_those_of_transformers(seed: int, tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path, seed=20 + seed, eos_token_id=[EOS, 10 + seed])
    reference = load_in_transformers(folder)
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 40}
    with LLM(str(folder), kv_cache_block_size=16) as llm:
        outputs = llm.beam_search(["One", "Two words"], **options)
        end_ids = llm.tokenizer.eos_token_ids
        assert beam_tuples(outputs[:3]) == reference_beams(reference, llm, "One", end_ids, **options)
        assert beam_tuples(outputs[3:]) == reference_beams(reference, llm, "Two words", end_ids, **options)


def test_a_single_beam_is_greedy_and_beams_can_ignore_end_tokens(llm: LLM, reference: Any) -> None:
    from penstock import SamplingParams

    greedy_params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    (beam,) = llm.beam_search("Hello", num_beams=1, max_new_tokens=30, ignore_eos=True)
    assert beam.token_ids == llm.generate("Hello", greedy_params)[0].token_ids
    assert (beam.finish_reason, beam.num_generated_tokens) == ("length", 30)
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 30}
    (best_beam,) = llm.beam_search("Hello", ignore_eos=True, **options)
    reference.generation_config.eos_token_id = None
    assert beam_tuples([best_beam]) == reference_beams(reference, llm, "Hello", set(), **options)


def test_log_probabilities_of_beams_equal_transformers(llm: LLM, reference: Any) -> None:
    for output in llm.beam_search(PROMPTS, num_beams=3, num_return_sequences=3, max_new_tokens=12):
        log_probabilities = output.log_probabilities
        assert log_probabilities is not None
        tokens = output.prompt_token_ids + output.token_ids
        scores = torch.log_softmax(transformers_logits(reference, tokens), -1)
        prompt_length = len(output.prompt_token_ids)
        expected = [scores[prompt_length + i - 1, token].item() for i, token in enumerate(output.token_ids)]
        np.testing.assert_allclose(log_probabilities.token_log_probabilities, expected, atol=1e-4)
        assert [list(top_entries) for top_entries in log_probabilities.top_log_probabilities] == [
            [token] for token in output.token_ids
        ]
        assert output.num_generated_tokens == len(output.token_ids) + (output.finish_reason == "stop")
        assert output.text == llm.tokenizer.decode_ids(output.token_ids)


def test_each_step_computes_one_token_per_beam_after_the_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_counts: list[int] = []
    execute = llm.pipeline.model.execute

    def count_execute(inputs: Any) -> Any:
        row_counts.append(len(inputs.tokens))
        return execute(inputs)

    monkeypatch.setattr(llm.pipeline.model, "execute", count_execute)
    prompt = "No earlier test uses this text, so none of its blocks are in the cache"
    (output,) = llm.beam_search(prompt, num_beams=4, max_new_tokens=40, ignore_eos=True)
    assert output.num_generated_tokens == 40
    assert row_counts == [len(prompt)] + [4] * 39


def test_replacing_the_sampled_token_keeps_the_computed_blocks() -> None:
    """The counts of computed and committed tokens stay, even at the end of a block."""
    context = make_context(range(1, 17))
    context.update(5)
    context.set_token_indices(committed_idx=16)
    _replace_last(context, 7)
    assert context.all_tokens.tolist() == [*range(1, 17), 7]
    assert (context.start_idx, context.active_idx, context.committed_idx) == (16, 17, 16)


def test_small_step_limits_give_the_same_beams(model: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 20, "num_return_sequences": 4}
    expected = beam_tuples(llm.beam_search(PROMPTS, **options))
    small_limits = {"max_batch_size": 3, "max_batch_input_tokens": 7}
    with LLM(str(model), kv_cache_block_size=16, deterministic=True, **small_limits) as small_llm:
        assert beam_tuples(small_llm.beam_search(PROMPTS, **options)) == expected
        small_llm.pipeline.kv.check_integrity()


def test_prompts_that_exceed_the_cache_together_give_the_same_beams_and_too_many_beams_fail(
    model: Path, llm: LLM
) -> None:
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 30}
    expected = beam_tuples(llm.beam_search(PROMPTS, **options))
    bytes_per_block = 16 * 2 * 2 * 2 * 8 * 4
    with LLM(
        str(model),
        kv_cache_block_size=16,
        deterministic=True,
        kv_cache_memory=18 * bytes_per_block,
        max_batch_size=16,
    ) as small_llm:
        assert beam_tuples(small_llm.beam_search(PROMPTS, **options)) == expected
        assert small_llm.pipeline.kv.num_free_blocks == small_llm.pipeline.kv.num_blocks
        with pytest.raises(InsufficientBlocksError):
            small_llm.beam_search(PROMPTS[2], num_beams=16, max_new_tokens=40)
        assert small_llm.pipeline.kv.num_free_blocks == small_llm.pipeline.kv.num_blocks
        assert len(small_llm.generate("Hello")) == 1


def test_beams_end_at_the_maximum_length_and_no_prompts_give_no_beams(llm: LLM) -> None:
    prompt = "x" * (MAX_LENGTH - 3)
    outputs = llm.beam_search(prompt, num_beams=3, num_return_sequences=3, ignore_eos=True)
    assert [output.num_generated_tokens for output in outputs] == [3, 3, 3]
    assert llm.beam_search([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer of at least 1, was 0"),
        ({"num_beams": True}, "num_beams must be .*, was True"),
        ({"num_return_sequences": 0}, "num_return_sequences must be .*, was 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "is 3, but only 2 beams run"),
        ({"length_penalty": float("nan")}, r"length_penalty must be in \[-100, 100\], was nan"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never', was 'soon'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BeamOptions(**options)


def test_numpy_numbers_are_accepted_as_options() -> None:
    options: dict[str, Any] = {
        "num_beams": np.int64(3),
        "length_penalty": np.float32(0.5),
        "early_stopping": np.True_,
    }
    assert repr(BeamOptions(**options)) == repr(
        BeamOptions(num_beams=3, length_penalty=0.5, early_stopping=True)
    )


def test_the_error_of_an_empty_prompt_has_the_number_of_the_prompt(llm: LLM) -> None:
    with pytest.raises(InputError, match="the prompt is empty") as caught:
        llm.beam_search(["Hello", ""])
    assert caught.value.__notes__ == ["in prompt 2 of 2"]


def test_beam_search_with_speculation_is_refused(model: Path) -> None:
    with (
        LLM(str(model), speculative_method="ngram") as llm,
        pytest.raises(UnsupportedFeatureError, match="beam search with speculative decoding"),
    ):
        llm.beam_search("Hello")


def test_an_error_during_the_search_frees_all_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, calls = llm.pipeline.execute, []

    def fail_at_sixth_call(batch: Any, num_steps: int = 1) -> Any:
        calls.append(batch)
        if len(calls) > 5:
            raise FloatingPointError("the forward failed")
        return execute(batch, num_steps)

    monkeypatch.setattr(llm.pipeline, "execute", fail_at_sixth_call)
    with pytest.raises(FloatingPointError):
        llm.beam_search(PROMPTS, num_beams=4)


def test_the_text_of_a_beam_continues_from_the_prompt(shared_data: Path) -> None:
    tokenizer = TextTokenizer(shared_data / "models/stories260K")
    prompt, the_ids = (
        tokenizer.encode_text(text, add_special_tokens=False).tolist() for text in ("One", "the")
    )
    context = tokenizer.build_context(TokenGeneratorRequest("1", 0, "m", prompt=prompt))
    beam = Hypothesis([*the_ids, tokenizer.eos], [-1.0] * (len(the_ids) + 1), -1.0, has_end_token=True)
    output = GenerationOutput.from_beam(context, 0, beam, tokenizer)
    assert (output.text, output.token_ids, output.num_generated_tokens) == (
        " the",
        the_ids,
        len(the_ids) + 1,
    )

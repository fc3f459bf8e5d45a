"""Speculation with a draft model, which has a separate KV cache. Speculation does not change the output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.pipeline_steps import make_context
from support.speculation import PROMPT, mixed_contexts, output_tokens, run_directly, run_scheduled
from support.tiny_llm import write_tiny_llm

from penstock import LLM
from penstock.architectures.llama import tiny_config
from penstock.assembly import load_pipeline, load_tokenizer
from penstock.errors import ConfigError, InsufficientMemoryError
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import Grammar, SamplingParams
from penstock.pipelines.speculative import SpeculationStats
from penstock.pipelines.speculative.draft_model import DraftModelProposer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("target"), tiny_config()))


@pytest.fixture(scope="module")
def noisy_draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with noise added to the target's weights. About half of its drafts are accepted."""
    folder = tmp_path_factory.mktemp("noisy_draft")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(target / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.004 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((target / "config.json").read_text())
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def unrelated_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random draft model with a maximum length of 48. Its drafts are rarely accepted."""
    config = tiny_config() | {"num_hidden_layers": 1, "max_position_embeddings": 48}
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("unrelated_draft"), config, seed=5))


def write_tokenizer(folder: Path) -> Path:
    tokenizer = write_tiny_llm(folder / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tokenizer / name).read_text())
    return folder


def open_with_draft(
    target: Path, draft: Path, **config: Any
) -> tuple[TextGenerationPipeline, DraftModelProposer]:
    values = {
        "model_path": str(target),
        "draft_model_path": str(draft),
        "deterministic": True,
        "adaptive_speculation": False,
        "num_speculative_tokens": 4,
        "kv_cache_block_size": 16,
        "max_batch_size": 8,
    }
    pipeline_config = PipelineConfig.from_flat(values | config)
    pipeline = load_pipeline(pipeline_config, load_tokenizer(pipeline_config))
    assert isinstance(pipeline.proposer, DraftModelProposer)
    run_directly(pipeline, [make_context([1], 1)])  # the vocabulary size for checks is known after a forward
    return pipeline, pipeline.proposer


def run_without_drafts(pipeline: TextGenerationPipeline, contexts: Any) -> Any:
    proposer, pipeline.proposer = pipeline.proposer, None
    results = run_directly(pipeline, contexts)
    pipeline.proposer = proposer
    return results


@pytest.mark.parametrize("draft", ["target", "noisy_draft", "unrelated_draft"])
def test_a_mixed_batch_with_a_draft_model_gives_the_output_of_plain_decoding(
    request: pytest.FixtureRequest, target: Path, draft: str
) -> None:
    pipeline, proposer = open_with_draft(target, request.getfixturevalue(draft))
    plain_results = run_without_drafts(pipeline, mixed_contexts())
    assert run_directly(pipeline, mixed_contexts(), num_steps=3) == plain_results
    stats = pipeline.speculation_stats
    rate = stats.acceptance_rate
    assert {"target": rate == 1, "noisy_draft": 0.2 < rate < 0.99, "unrelated_draft": rate < 0.2}[draft], rate
    assert stats.num_proposed > 50
    proposer.kv.check_integrity()
    assert proposer.kv.num_free_blocks == proposer.kv.num_blocks, "the state of all contexts is released"


def test_the_draft_model_samples_with_the_random_numbers_of_the_target(target: Path) -> None:
    """With other random numbers, sampled drafts of similar models would rarely be accepted."""
    pipeline, _ = open_with_draft(target, target)
    sampling = SamplingParams(temperature=1.0, top_k=-1, seed=11)
    run_directly(pipeline, [make_context(PROMPT, 40, sampling_params=sampling)])
    assert pipeline.speculation_stats.acceptance_rate == 1


def test_accepted_drafts_are_not_computed_again(target: Path) -> None:
    pipeline, proposer = open_with_draft(target, target)
    row_counts: list[int] = []
    execute = proposer.model.execute

    def count_execute(inputs: Any) -> Any:
        row_counts.append(len(inputs.tokens))
        return execute(inputs)

    proposer.model.execute = count_execute  # type: ignore[method-assign]
    context = make_context(PROMPT, 31, request_id="a")
    pipeline.execute({"a": context})
    assert row_counts == [30, 1, 1, 1]
    row_counts.clear()
    pipeline.execute({"a": context})
    assert row_counts == [2, 1, 1, 1], "the draft model computes the last draft and the token after it"
    assert context.draft_offset == 1, "the target has computed the last draft, the draft model has not"
    pipeline.release(context)


def test_the_draft_cache_is_correct_after_rejections(target: Path, noisy_draft: Path) -> None:
    """The drafts equal the drafts of a proposer that computes all tokens of the context anew."""
    pipeline, proposer_with_history = open_with_draft(target, noisy_draft)
    _, new_proposer = open_with_draft(target, noisy_draft)
    context = make_context(PROMPT, 60, request_id="a")
    accepted_counts = []
    while context.current_length < 80:
        expected = new_proposer.propose([context], [4])
        new_proposer.release(context)
        assert proposer_with_history.propose([context], [4]) == expected
        length_before = context.current_length
        pipeline.execute({"a": context})
        accepted_counts.append(context.current_length - length_before - 1)
    assert {4} < set(accepted_counts), "some drafts are accepted completely, others partly"
    pipeline.release(context)


@pytest.mark.parametrize("draft", ["noisy_draft", "unrelated_draft"])
def test_prompts_in_chunks_give_the_output_of_plain_decoding(
    request: pytest.FixtureRequest, target: Path, draft: str
) -> None:
    pipeline, proposer = open_with_draft(target, request.getfixturevalue(draft), max_batch_input_tokens=16)
    plain_results = run_without_drafts(pipeline, mixed_contexts())
    row_counts = []
    execute = proposer.model.execute

    def measure_execute(inputs: Any) -> Any:
        row_counts.append(len(inputs.tokens))
        return execute(inputs)

    proposer.model.execute = measure_execute  # type: ignore[method-assign]
    results, _ = run_scheduled(
        pipeline, mixed_contexts(), max_batch_size=4, max_batch_input_tokens=16, min_chunk_size=3
    )
    assert results == plain_results
    assert max(row_counts) <= 16
    assert pipeline.speculation_stats.num_proposed


def test_preempted_contexts_give_the_output_of_plain_decoding(target: Path, noisy_draft: Path) -> None:
    large_pipeline, _ = open_with_draft(target, noisy_draft)
    plain_results = run_without_drafts(large_pipeline, mixed_contexts())
    block_bytes = 2 * 4 * 2 * 3 * 2 * 8 * 16  # for one block of both models
    small_pipeline, proposer = open_with_draft(
        target, noisy_draft, max_length=80, kv_cache_memory=block_bytes * 13, max_batch_size=6
    )
    assert small_pipeline.kv.num_blocks == proposer.kv.num_blocks == 12
    results, scheduler = run_scheduled(
        small_pipeline, mixed_contexts(), max_batch_size=6, max_batch_input_tokens=40
    )
    assert scheduler.num_preemptions
    assert results == plain_results
    assert small_pipeline.speculation_stats.num_accepted
    proposer.kv.check_integrity()


def test_a_nearly_full_draft_cache_does_not_change_the_output(target: Path, noisy_draft: Path) -> None:
    pipeline, proposer = open_with_draft(target, noisy_draft)
    plain_results = run_without_drafts(pipeline, mixed_contexts())
    blocking_contexts = [make_context([token] * 16, 1) for token in range(proposer.kv.num_free_blocks - 3)]
    for context in blocking_contexts:
        proposer.kv.claim(context)
        proposer.kv.reserve(context)
    assert run_directly(pipeline, mixed_contexts()) == plain_results
    assert pipeline.speculation_stats.num_proposed
    for context in blocking_contexts:
        proposer.kv.release(context)
    proposer.kv.check_integrity()


def test_a_full_draft_cache_evicts_idle_contexts(target: Path, noisy_draft: Path) -> None:
    block_bytes = 2 * 4 * 2 * 3 * 2 * 8 * 16  # for one block of both models
    _, proposer = open_with_draft(
        target, noisy_draft, max_length=80, kv_cache_memory=block_bytes * 9, max_batch_size=4
    )
    contexts = [make_context([token] * 30, 40) for token in range(6)]
    drafts = [proposer.propose([context], [4])[0] for context in contexts]
    assert [len(draft) for draft in drafts] == [4] * 6, (
        "8 blocks suffice for two or three of the six contexts"
    )
    assert proposer.propose(contexts[:1], [4]) == drafts[:1], "the evicted first context is recomputed"
    assert any(not draft for draft in proposer.propose(contexts, [4] * 6)), (
        "the blocks do not suffice for all contexts at once"
    )
    for context in contexts:
        proposer.release(context)
    proposer.kv.check_integrity()
    assert proposer.kv.num_free_blocks == proposer.kv.num_blocks


def test_a_prefix_cached_only_by_the_target_is_computed_by_the_draft_model(target: Path) -> None:
    pipeline, _ = open_with_draft(target, target)
    (plain_results,) = run_without_drafts(pipeline, [make_context(PROMPT, 30, request_id="a")]).values()
    context = make_context(PROMPT, 30, request_id="a")
    assert run_directly(pipeline, [context])["a"] == plain_results
    assert context.num_cached_tokens == 16
    assert pipeline.speculation_stats.acceptance_rate == 1


def test_the_draft_model_computes_tokens_of_steps_without_drafts(target: Path) -> None:
    pipeline, _ = open_with_draft(target, target)
    draft_lengths = pipeline.draft_lengths
    assert draft_lengths is not None
    context = make_context(PROMPT, 40, request_id="a")
    drafting_steps = [True, False, False, False, True]
    for is_drafting in drafting_steps:
        draft_lengths.num_drafts = 4 if is_drafting else 0  # type: ignore[attr-defined]
        length_before = context.current_length
        pipeline.execute({"a": context})
        assert context.current_length - length_before == (5 if is_drafting else 1)
        assert (context.draft_offset > 1) == (context.current_length in (36, 37, 38))
    pipeline.release(context)


def test_a_rolled_back_context_gives_the_output_of_plain_decoding(target: Path) -> None:
    pipeline, _ = open_with_draft(target, target)
    context = make_context(PROMPT, 60, request_id="a")
    pipeline.execute({"a": context})
    context.rollback(3)
    pipeline.execute({"a": context})
    full_tokens = context.generated_tokens.tolist()
    plain_context = make_context(PROMPT, len(full_tokens), request_id="a")
    assert output_tokens(run_without_drafts(pipeline, [plain_context]))["a"] == full_tokens
    assert pipeline.speculation_stats.acceptance_rate == 1
    pipeline.release(context)


def test_the_memory_plan_includes_both_models(target: Path, noisy_draft: Path) -> None:
    target_config = PipelineConfig.from_flat({"model_path": str(target), "deterministic": True})
    pipeline, proposer = open_with_draft(target, noisy_draft, kv_cache_memory=10**6)
    caches = [*pipeline.kv.storage.caches, *proposer.kv.storage.caches]  # type: ignore[attr-defined]
    assert sum(cache.nbytes for cache in caches) <= 10**6
    assert pipeline.kv.num_blocks == proposer.kv.num_blocks > 50
    assert pipeline.memory_plan.max_length == 256
    with pytest.raises(InsufficientMemoryError):
        open_with_draft(target, noisy_draft, kv_cache_memory=10**5, max_length=256)
    assert load_pipeline(target_config, load_tokenizer(target_config)).proposer is None


def test_a_draft_model_with_another_tokenizer_or_vocabulary_size_is_refused(
    target: Path, noisy_draft: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((noisy_draft / name).read_bytes())
    tokenizer = json.loads((noisy_draft / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!"], tokenizer["model"]["vocab"]['"'] = 1, 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"cannot draft for .*tokenizer.json differ"):
        open_with_draft(target, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    open_with_draft(target, tmp_path)
    values = json.loads((noisy_draft / "config.json").read_text()) | {"vocab_size": 131}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="the target has 130 tokens, the draft model 131"):
        open_with_draft(target, tmp_path)


@pytest.mark.parametrize("top_k", [1, -1])
def test_a_trained_draft_model_gives_the_output_of_plain_decoding(shared_data: Path, top_k: int) -> None:
    models = shared_data / "models"
    params = [SamplingParams(max_new_tokens=40, temperature=0.8, top_k=top_k, seed=seed) for seed in range(3)]
    prompts = ["Once upon a time", "Lily and Tom went to the park. Lily and Tom", "One day, a little dog"]
    token_lists = []
    for draft in ({}, {"draft_model_path": str(models / "llama2xs"), "adaptive_speculation": False}):
        with LLM(str(models / "stories260K"), deterministic=True, **draft) as llm:
            token_lists.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            stats = llm.pipeline.speculation_stats
    assert token_lists[0] == token_lists[1]
    assert stats.num_accepted > 20


@pytest.mark.parametrize("name", ["llama2xs", "stories260K"])
def test_drafts_are_masked_by_the_grammar(
    shared_data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts do not change the text. Masking them raises the number of accepted drafts by over 10 %."""
    pytest.importorskip("xgrammar")
    models = shared_data / "models"
    params = [
        SamplingParams(max_new_tokens=60, temperature=temperature, top_k=-1, seed=seed)
        for seed, temperature in enumerate((0.0, 0.7, 1.0, 0.0))
    ]
    grammars = [
        Grammar("regex", "( [a-su-z]{1,9}){10}\\."),
        Grammar("regex", " [b-y]+( [b-y]+){9}\\."),
        Grammar("json_schema", '{"type": "array", "items": {"type": "string"}, "minItems": 3}'),
        None,
    ]
    prompts = ["Once upon a time", "One day, a little dog", "Lily said", "Tom went to the park"]

    def run(**config: Any) -> tuple[list[tuple[list[int], str]], SpeculationStats]:
        config |= {"deterministic": True, "adaptive_speculation": False}
        with LLM(str(models / "stories260K"), **config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, grammar=grammars)
            return [(output.token_ids, output.text) for output in outputs], llm.pipeline.speculation_stats

    texts, _ = run()
    assert re.fullmatch(grammars[0].text, texts[0][1]), "the text begins with a space"  # type: ignore[union-attr]
    texts_with_masks, stats = run(draft_model_path=str(models / name))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.pipelines.speculative.draft_model.grammar_bitmask", lambda *_: None)
        texts_without_masks, stats_without = run(draft_model_path=str(models / name))
    assert texts == texts_with_masks == texts_without_masks
    assert stats.num_accepted > 1.1 * stats_without.num_accepted
    assert stats.acceptance_rate == 1 or name != "stories260K", "drafts of the same model are always accepted"

"""Adapters in mixed batches, with chunks, prefix caching, and reloads during requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.adapters import peft_logits, write_adapter
from support.pipeline_steps import (
    append_token,
    generate_tokens,
    make_context,
    open_pipeline,
    random_tokens,
    step_logits,
)

from penstock.errors import InputError, UnknownModelError
from penstock.kernels import LoRAInputs
from penstock.lora import LoRAManager, slots
from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams
from penstock.scheduler import Scheduler

pytestmark = pytest.mark.models

PROMPT = random_tokens(40, 130, seed=5)


@pytest.fixture
def open_adapted(checkpoint: Path, adapters: dict[str, Path]) -> Callable[..., TextGenerationPipeline]:
    def open_with_settings(**config: object) -> TextGenerationPipeline:
        settings = {
            "lora": tuple(f"{name}={path}" for name, path in adapters.items()),
            "kv_cache_block_size": 16,
        }
        return open_pipeline(checkpoint, **{**settings, "deterministic": True, **config})

    return open_with_settings


def lora_manager(pipeline: TextGenerationPipeline) -> LoRAManager:
    manager = pipeline.model.lora_manager
    assert manager is not None
    return manager


ADAPTER_NAMES = ["all", None, "some", "head", "all", None, "some"]


def compute_batch_and_single_logits(
    pipeline: TextGenerationPipeline,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the logits of a batch of several adapters, and of each context in a separate step."""
    lengths = [3, 17, 1, 40, 9, 2, 33]
    batch = [make_context(PROMPT[:n], adapter=name) for n, name in zip(lengths, ADAPTER_NAMES, strict=True)]
    batch_logits = step_logits(pipeline, batch)
    for context in batch:
        pipeline.release(context)
    single_logits = []
    for context in batch:
        context.reset()
        single_logits += step_logits(pipeline, [context])
        pipeline.release(context)
    return batch_logits, single_logits


def test_a_mixed_batch_is_bit_equal_to_single_requests(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    batch_logits, single_logits = compute_batch_and_single_logits(open_adapted(enable_prefix_caching=False))
    for actual, expected in zip(batch_logits, single_logits, strict=True):
        assert torch.equal(actual, expected)


def test_a_mixed_batch_without_deterministic_is_close_to_single_requests_and_peft(
    open_adapted: Callable[..., TextGenerationPipeline],
    checkpoint: Path,
    adapters: dict[str, Path],
) -> None:
    batch_logits, single_logits = compute_batch_and_single_logits(
        open_adapted(deterministic=False, enable_prefix_caching=False)
    )
    for actual, expected in zip(batch_logits, single_logits, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        batch_logits[3], peft_logits(checkpoint, adapters["head"], PROMPT), atol=1e-4, rtol=1e-5
    )


def test_rows_without_an_adapter_are_bit_equal_to_the_base_model(
    open_adapted: Callable[..., TextGenerationPipeline], checkpoint: Path
) -> None:
    """The two pipelines multiply equally many rows in a step, so their results are bit-equal."""
    plain_pipeline = open_pipeline(checkpoint, kv_cache_block_size=16, enable_prefix_caching=False)
    adapted_pipeline = open_adapted(deterministic=False, enable_prefix_caching=False)
    lengths = [3, 17, 1, 40, 9, 2, 33]
    plain_logits = step_logits(plain_pipeline, [make_context(PROMPT[:n]) for n in lengths])
    batch = [make_context(PROMPT[:n], adapter=name) for n, name in zip(lengths, ADAPTER_NAMES, strict=True)]
    for name, adapted_logits, expected in zip(
        ADAPTER_NAMES, step_logits(adapted_pipeline, batch), plain_logits, strict=True
    ):
        assert torch.equal(adapted_logits, expected) == (name is None)


def test_chunks_and_single_tokens_equal_a_whole_prefill(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    pipeline = open_adapted(enable_prefix_caching=False)
    (full_logits,) = step_logits(pipeline, [make_context(PROMPT, adapter="head")])
    context, chunk_logits = make_context(PROMPT, adapter="head"), []
    for end in (7, 8, 30, 40):
        context.set_token_indices(active_idx=end)
        chunk_logits += step_logits(pipeline, [context])
        append_token(pipeline, context, 0)
    assert torch.equal(torch.cat(chunk_logits), full_logits)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_batched_generation_equals_single_generation(
    open_adapted: Callable[..., TextGenerationPipeline], num_steps: int
) -> None:
    pipeline = open_adapted()

    def make_sampled_context(name: str | None) -> object:
        return make_context(
            PROMPT[:20], 8, adapter=name, sampling_params=SamplingParams(temperature=1, seed=3)
        )

    single_texts = [generate_tokens(pipeline, [make_sampled_context(name)])[0] for name in ADAPTER_NAMES]
    assert (
        generate_tokens(pipeline, [make_sampled_context(name) for name in ADAPTER_NAMES], num_steps)
        == single_texts
    )
    assert len({tuple(text) for text in single_texts}) == 4


# -- The prefix cache ------------------------------------------------------------------------------------


def test_only_requests_with_the_same_adapter_share_blocks(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    pipeline = open_adapted()
    cached_token_counts = {}
    for name in ("all", "some", None, "all", "some", None):
        context = make_context(PROMPT, 2, adapter=name)
        generate_tokens(pipeline, [context])
        cached_token_counts.setdefault(name, []).append(context.num_cached_tokens)
    assert cached_token_counts == {"all": [0, 32], "some": [0, 32], None: [0, 32]}


def test_a_reload_never_serves_stale_blocks(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "tone"
    shutil.copytree(adapters["all"], folder)
    pipeline = open_pipeline(checkpoint, lora=(f"tone={folder}",), deterministic=True, kv_cache_block_size=16)
    generate_tokens(pipeline, [make_context(PROMPT, 2, adapter="tone")])
    shutil.rmtree(folder)
    write_adapter(checkpoint, folder, seed=9)
    lora_manager(pipeline).load("tone", str(folder))
    context = make_context(PROMPT, adapter="tone")
    (actual,) = step_logits(pipeline, [context])
    assert context.num_cached_tokens == 0
    torch.testing.assert_close(actual, peft_logits(checkpoint, folder, PROMPT), atol=1e-4, rtol=1e-5)
    pipeline.release(context)
    shutil.rmtree(folder)
    shutil.copytree(adapters["all"], folder)
    lora_manager(pipeline).load("tone", str(folder))
    context = make_context(PROMPT, 2, adapter="tone")
    generate_tokens(pipeline, [context])
    assert context.num_cached_tokens == 32, (
        "the first content is loaded again, so its cached blocks are reused"
    )


def test_a_running_request_keeps_its_adapter_content(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter's content stays the same after a reload, an unload and a preemption."""
    pipeline = open_pipeline(
        checkpoint, lora=(f"tone={adapters['all']}",), max_loras=1, deterministic=True, kv_cache_block_size=16
    )
    manager = lora_manager(pipeline)
    (expected,) = generate_tokens(pipeline, [make_context(PROMPT, 9, adapter="tone")])
    context, tokens = make_context(PROMPT, 9, adapter="tone"), []
    for step in range(9):
        if step == 2:
            manager.load("tone", str(adapters["some"]))
            (reloaded_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 9, adapter="tone")])
        if step == 4:  # the scheduler preempts a context in this way
            pipeline.kv.release(context)
            context.reset()
        if step == 6:
            manager.unload("tone")
        response = pipeline.execute({"a": context})["a"]
        tokens += [int(token.next_token) for token in response.tokens]
    assert tokens == expected != reloaded_tokens
    pipeline.release(context)
    with pytest.raises(UnknownModelError, match="'tone' is not served"):
        pipeline.execute({"a": make_context(PROMPT, adapter="tone")})


def test_changes_of_the_files_after_loading_have_no_effect(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "tone"
    shutil.copytree(adapters["all"], folder)
    pipeline = open_pipeline(checkpoint, lora=(f"tone={folder}",))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(bytes(len(file.read_bytes())))
    (actual,) = step_logits(pipeline, [make_context(PROMPT, adapter="tone")])
    torch.testing.assert_close(actual, peft_logits(checkpoint, adapters["all"], PROMPT), atol=1e-4, rtol=1e-5)


# -- More adapters than slots ----------------------------------------------------------------------------


def test_more_adapters_than_slots_run_one_after_another(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    pipeline = open_adapted(max_loras=1)
    expected = {
        name: generate_tokens(open_adapted(), [make_context(PROMPT, 5, adapter=name)])[0]
        for name in ("all", "some", "head", None)
    }
    scheduler = Scheduler(pipeline, max_batch_size=8, ready=pipeline.ready)
    contexts = [make_context(PROMPT, 5, adapter=name) for name in ADAPTER_NAMES]
    for context in contexts:
        scheduler.submit(context)
    texts: dict[str, list[int]] = {context.request_id: [] for context in contexts}
    for _ in range(100):
        for request_id, output in scheduler.step().items():
            texts[request_id] += [int(token.next_token) for token in output.tokens]
        if not scheduler.has_work:
            break
    assert not scheduler.failures
    assert [texts[context.request_id] for context in contexts] == [expected[name] for name in ADAPTER_NAMES]


def test_a_batch_of_too_many_adapters_is_refused_before_anything_changes(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    pipeline = open_adapted(max_loras=2)
    batch = {name: make_context(PROMPT, adapter=name, request_id=name) for name in ("all", "some", "head")}
    with pytest.raises(InputError, match=r"uses 3 adapters, and at most 2 can run at once.*--max-loras"):
        pipeline.execute(batch)
    assert not any(context.is_assigned_to_cache for context in batch.values())
    del batch["some"]
    assert set(pipeline.execute(batch)) == {"all", "head"}


def test_the_error_for_an_unknown_adapter_lists_the_loaded_ones(
    open_adapted: Callable[..., TextGenerationPipeline],
) -> None:
    pipeline, context = open_adapted(), make_context(PROMPT, adapter="al")
    with pytest.raises(UnknownModelError, match=r"'al' is not served here; served are: .*, all, some, head"):
        pipeline.execute({"a": context})
    assert not context.is_assigned_to_cache


def test_slots_use_the_planned_memory(
    open_adapted: Callable[..., TextGenerationPipeline],
    checkpoint: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    pipeline = open_adapted(max_loras=2, max_lora_rank=6)
    slots = lora_manager(pipeline)._slots

    def used_bytes() -> int:
        return sum(down.nbytes + up.nbytes for down, up in slots.matrices.values())

    assert used_bytes() == 0
    generate_tokens(
        pipeline, [make_context(PROMPT, 1, adapter="all"), make_context(PROMPT, 1, adapter="head")]
    )
    assert used_bytes() == pipeline.memory_plan.adapters_size > 0


# -- Mutations that the comparison with PEFT must detect ---------------------------------------------------


def swap_matrices(inputs: LoRAInputs) -> LoRAInputs:
    return LoRAInputs(
        inputs.rows, {name: (down.flip(0), up) for name, (down, up) in inputs.matrices.items()}, inputs.ranks
    )


def shift_rows(inputs: LoRAInputs) -> LoRAInputs:
    return LoRAInputs(inputs.rows.roll(1), inputs.matrices, inputs.ranks)


def halve_scale(inputs: LoRAInputs) -> LoRAInputs:
    return LoRAInputs(
        inputs.rows, {name: (down, up / 2) for name, (down, up) in inputs.matrices.items()}, inputs.ranks
    )


@pytest.mark.parametrize("mutate", [swap_matrices, shift_rows, halve_scale])
def test_the_comparison_detects_a_mutation(
    open_adapted: Callable[..., TextGenerationPipeline],
    checkpoint: Path,
    adapters: dict[str, Path],
    mutate: Callable[[LoRAInputs], LoRAInputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = open_adapted(max_loras=2)
    original_inputs = LoRAManager.inputs
    monkeypatch.setattr(LoRAManager, "inputs", lambda *arguments: mutate(original_inputs(*arguments)))
    batch = [make_context(PROMPT, adapter="all"), make_context(PROMPT, adapter="some")]
    actual = step_logits(pipeline, batch)[1]
    expected = peft_logits(checkpoint, adapters["some"], PROMPT)
    assert float((actual - expected).abs().max()) > 0.01


# -- Eviction of adapters --------------------------------------------------------------------------------


def test_the_slot_of_the_least_recently_used_adapter_is_reused(
    open_adapted: Callable[..., TextGenerationPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = open_adapted(max_loras=2)
    placed_adapters: list[str] = []
    original_put = slots.AdapterSlots._put
    names_by_digest = {digest: name for name, digest in _digests(pipeline).items()}

    def record_and_put(self: slots.AdapterSlots, slot: int, adapter: object) -> None:
        placed_adapters.append(names_by_digest[adapter.digest])  # type: ignore[attr-defined]
        original_put(self, slot, adapter)  # type: ignore[arg-type]

    monkeypatch.setattr(slots.AdapterSlots, "_put", record_and_put)
    for name in ("all", "some", "all", "head", "all", "some"):
        generate_tokens(pipeline, [make_context(PROMPT, 1, adapter=name)])
    assert placed_adapters == ["all", "some", "head", "some"]


def _digests(pipeline: TextGenerationPipeline) -> dict[str, bytes]:
    manager, digests = lora_manager(pipeline), {}
    for name, _ in manager.names():
        context = make_context(PROMPT, adapter=name)
        digests[name] = manager.digest(context)
        manager.release(context)
    return digests

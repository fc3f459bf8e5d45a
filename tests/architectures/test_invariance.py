"""With ``deterministic=True`` results do not depend on batches, chunks, steps, prefix hits or preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pipeline_steps import chunked_logits, generate_tokens, make_context, open_pipeline, random_tokens

from penstock.pipelines import TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext

pytestmark = [pytest.mark.families, pytest.mark.models]

SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=1234)
PROMPT = random_tokens(75, 130, seed=1)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"deterministic": True, "quantization_encoding": request.param, "kv_cache_block_size": 16}


@pytest.fixture
def pipeline(checkpoint: Path, config: dict[str, Any]) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, **config)


@pytest.fixture(scope="module")
def uncached_pipeline(checkpoint: Path, config: dict[str, Any]) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, enable_prefix_caching=False, **config)


@pytest.fixture(scope="module", params=[SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def sampling_params(request: pytest.FixtureRequest) -> SamplingParams:
    params: SamplingParams = request.param
    return params


def make_sampling_context(sampling_params: SamplingParams, max_new_tokens: int = 18) -> TextContext:
    return make_context(PROMPT, max_new_tokens, sampling_params=sampling_params)


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize(
    ("chunks", "other_lengths"),
    [([75], [1, 30]), ([1] * 75, []), ([10, 33, 32], []), ([10, 33, 32], [3, 17, 64]), ([74, 1], [1])],
)
def test_logits_are_bit_equal_in_chunks_and_batches(
    uncached_pipeline: TextGenerationPipeline, chunks: list[int], other_lengths: list[int]
) -> None:
    single_logits = chunked_logits(uncached_pipeline, make_context(PROMPT), [75])
    assert torch.equal(
        chunked_logits(uncached_pipeline, make_context(PROMPT), chunks, other_lengths), single_logits
    )


@pytest.mark.matrix(strength=1)
def test_batched_results_equal_single_results(
    uncached_pipeline: TextGenerationPipeline, sampling_params: SamplingParams
) -> None:
    (single_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)])
    other_contexts = [
        make_context(random_tokens(n, 130, seed=n), 5 + n % 20, sampling_params=sampling_params)
        for n in (1, 9, 70)
    ]
    assert (
        generate_tokens(uncached_pipeline, [*other_contexts, make_sampling_context(sampling_params)])[-1]
        == single_tokens
    )


@pytest.mark.matrix(strength=1)
def test_multiple_steps_equal_single_steps(
    uncached_pipeline: TextGenerationPipeline, sampling_params: SamplingParams
) -> None:
    (single_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)])
    assert generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)], num_steps=6) == [
        single_tokens
    ]


@pytest.mark.matrix(strength=1)
def test_chunked_results_equal_whole_results(
    uncached_pipeline: TextGenerationPipeline, sampling_params: SamplingParams
) -> None:
    (full_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)])
    context = make_sampling_context(sampling_params)
    for end in (13, 14, 50):
        context.set_token_indices(active_idx=end)
        response = uncached_pipeline.execute({"a": context})["a"]
        assert not response.tokens
        assert not response.is_done
    assert generate_tokens(uncached_pipeline, [context]) == [full_tokens]


def has_states(pipeline: TextGenerationPipeline) -> bool:
    """Return whether the model has recurrent states."""
    spec = pipeline.model.kv_cache_spec
    return spec is not None and spec.states is not None


@pytest.mark.matrix(strength=1)
def test_results_with_a_prefix_hit_equal_uncached_results(
    pipeline: TextGenerationPipeline,
    uncached_pipeline: TextGenerationPipeline,
    sampling_params: SamplingParams,
) -> None:
    (uncached_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)])
    generate_tokens(pipeline, [make_sampling_context(sampling_params)])
    context = make_sampling_context(sampling_params)
    assert generate_tokens(pipeline, [context]) == [uncached_tokens]
    assert context.num_cached_tokens == 64, "four full blocks of 16 tokens"
    if has_states(pipeline):  # a context with another continuation saves the state at the common prefix
        generate_tokens(pipeline, [make_context(PROMPT[:50] + [9] * 20, 2)])
    shared_context = make_context(PROMPT[:50] + PROMPT[:25], 18, sampling_params=sampling_params)
    (expected_tokens,) = generate_tokens(
        uncached_pipeline, [make_context(PROMPT[:50] + PROMPT[:25], 18, sampling_params=sampling_params)]
    )
    assert generate_tokens(pipeline, [shared_context]) == [expected_tokens]
    assert shared_context.num_cached_tokens == 48


@pytest.mark.matrix(strength=1)
def test_preempted_results_equal_uninterrupted_results(
    pipeline: TextGenerationPipeline,
    uncached_pipeline: TextGenerationPipeline,
    sampling_params: SamplingParams,
) -> None:
    (uninterrupted_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(sampling_params)])
    for tested_pipeline in (pipeline, uncached_pipeline):
        context, tokens = make_sampling_context(sampling_params), []
        for num_generated in (1, 5, 12):
            while len(context.generated_tokens) < num_generated:
                tokens += [
                    output.next_token for output in tested_pipeline.execute({"a": context})["a"].tokens
                ]
            tested_pipeline.release(context)
            context.reset()
        assert tokens + generate_tokens(tested_pipeline, [context])[0] == uninterrupted_tokens


@pytest.mark.matrix(strength=1)
def test_the_seed_determines_the_sampled_tokens(uncached_pipeline: TextGenerationPipeline) -> None:
    def sampled_tokens(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, top_k=-1, seed=seed)
        return generate_tokens(uncached_pipeline, [make_context(PROMPT, 20, sampling_params=params)])[0]

    assert sampled_tokens(5) == sampled_tokens(5)
    assert sampled_tokens(5) != sampled_tokens(6)


@pytest.mark.matrix(strength=1)
def test_the_compared_outputs_have_several_distinct_tokens(uncached_pipeline: TextGenerationPipeline) -> None:
    """If all tokens were equal, the comparisons above could not detect an error."""
    (greedy_tokens,) = generate_tokens(uncached_pipeline, [make_sampling_context(SamplingParams(), 40)])
    assert len(np.unique(greedy_tokens)) > 5

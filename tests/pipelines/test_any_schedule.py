"""Random schedules with compiled and eager steps give the outputs of single requests in eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import write_checkpoint
from support.pipeline_steps import open_pipeline
from support.random_draws import num_examples
from support.speculation import OracleProposer, mixed_contexts, output_tokens, run_scheduled
from torch import Tensor

from penstock.architectures.llama import tiny_config
from penstock.kernels import cpu
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.encodings import int4
from penstock.kernels.graph import GraphCompiler
from penstock.pipelines import TextGenerationPipeline

pytestmark = pytest.mark.skipif(not cpu.available_isas(), reason="the C++ kernels are not built")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config() | sizes)


def open_small_model(checkpoint: Path, *, compiled: bool, **config: Any) -> TextGenerationPipeline:
    options = {"kv_cache_block_size": 16, "max_length": 96, "enable_prefix_caching": compiled}
    pipeline = open_pipeline(checkpoint, **options, **config)
    pipeline.session.use_graphs = compiled
    return pipeline


@pytest.mark.parametrize("kv_type", [None, "int8"])
@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int5", "int4"])
def test_outputs_of_any_schedule_equal_single_eager_requests(
    checkpoint: Path, encoding: str, kv_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encoding == "int4":
        # by default, the narrow layers of this model are stored as int5
        monkeypatch.setattr(int4, "NARROW_LAYER_SIZE", 0)
    encoding = "int4" if encoding == "int5" else encoding
    config: dict[str, Any] = {"quantization_encoding": encoding, "kv_cache_dtype": kv_type}
    single_pipeline = open_small_model(checkpoint, compiled=False, **config)
    single_outputs: dict[str, Any] = {}
    for context in mixed_contexts():
        single_outputs |= run_scheduled(single_pipeline, [context], max_batch_size=1)[0]
    num_blocks = single_pipeline.memory_plan.num_blocks[0]
    # The blocks do not suffice for all contexts, so some contexts are preempted.
    memory = single_pipeline.memory_plan.kv_cache_size * 12 // num_blocks
    pipeline = open_small_model(checkpoint, compiled=True, max_batch_size=1, kv_cache_memory=memory, **config)
    num_preemptions = 0

    @settings(max_examples=num_examples(5))
    @given(
        batch_size=st.sampled_from([2, 7]),
        max_batch_input_tokens=st.sampled_from([8, 24, 400]),
        max_graphs=st.sampled_from([1, 64]),
        num_drafts=st.sampled_from([0, 1, 5]),
        num_steps=st.sampled_from([1, 3, 8]),
    )
    def check_schedule(
        batch_size: int, max_batch_input_tokens: int, max_graphs: int, num_drafts: int, num_steps: int
    ) -> None:
        nonlocal num_preemptions
        oracle = OracleProposer(output_tokens(single_outputs), lambda j: j % 4 == 3, num_drafts)
        pipeline.proposer = oracle if num_drafts else None
        limits = {
            "max_batch_size": batch_size,
            "max_batch_input_tokens": max_batch_input_tokens,
            "min_chunk_size": 4,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphCompiler, "max_graphs", max_graphs)
            result, scheduler = run_scheduled(pipeline, mixed_contexts(), num_steps=num_steps, **limits)
        assert result == single_outputs
        num_preemptions += scheduler.num_preemptions

    check_schedule()
    assert num_preemptions
    pipeline.proposer = None
    run_scheduled(pipeline, mixed_contexts()[:1], max_batch_size=1)
    assert pipeline.session.graph_status.startswith("compiled")
    num_replays: list[int] = []
    replay_steps = CompiledPlan.replay_steps

    def count_replay(plan: CompiledPlan, *arguments: Any) -> Tensor:
        tokens = replay_steps(plan, *arguments)
        num_replays.append(len(tokens))
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledPlan, "replay_steps", count_replay)
        result, _ = run_scheduled(pipeline, mixed_contexts()[:4], num_steps=8, max_batch_size=2)
    assert result == {name: single_outputs[name] for name in result}
    assert 8 in num_replays

"""Models that run on their transformers modules with Penstock's attention, and models that are refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.checkpoints import (
    load_in_transformers,
    transformers_greedy,
    transformers_logits,
    write_checkpoint,
)
from support.documents import running_server
from support.pipeline_steps import append_token, generate_tokens, make_context, random_tokens, step_logits
from support.tiny_llm import VOCABULARY, write_tiny_llm

from penstock import LLM
from penstock.architectures.transformers_attention import paged_attention
from penstock.architectures.transformers_model import TransformersModel
from penstock.assembly import CATALOG
from penstock.errors import CheckpointError, ConfigError, UnknownArchitectureError, UnsupportedFeatureError
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import Grammar, SamplingParams

TOKENS = random_tokens(70, 130, seed=5)
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "vaultgemma": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
    "dots1": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention"] * 3,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20},
    "llama4_text": {
        "intermediate_size_mlp": 40,
        "num_local_experts": 5,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": False,
    },
}


def open_fallback(checkpoint: Path, **settings: Any) -> TextGenerationPipeline:
    """Open the pipeline of a checkpoint, by default with ``model_impl="transformers"`` in float32."""
    defaults = {"quantization_encoding": "float32", "max_batch_size": 8, "kv_cache_block_size": 16}
    defaults |= {"model_path": str(checkpoint), "model_impl": "transformers"}
    config = PipelineConfig.from_flat(defaults | settings)
    architecture, _ = CATALOG.resolve(config)
    architecture.check_encoding(config.model.encoding)
    return TextGenerationPipeline(config, architecture.load_pipeline_model(), -1)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SIZES | FAMILIES[request.param] | {"model_type": request.param}
    return write_checkpoint(tmp_path_factory.mktemp(request.param), config)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_in_transformers(checkpoint)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_fallback(checkpoint)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)


def test_chunks_steps_and_batches_equal_transformers(
    checkpoint: Path, pipeline: TextGenerationPipeline, reference: Any
) -> None:
    assert isinstance(pipeline.model, TransformersModel)
    expected = transformers_logits(reference, TOKENS)
    other_prompts = [random_tokens(length, 130, seed=length) for length in (30, 5)]
    chunked_context, long_context, short_context = (
        make_context(tokens, log_probabilities_echo=True) for tokens in (TOKENS[:60], *other_prompts)
    )
    chunked_context.set_token_indices(active_idx=33)
    batch_logits = step_logits(pipeline, [long_context, chunked_context, short_context])
    assert_close(batch_logits[1], expected[:33])
    for logits, tokens in zip((batch_logits[0], batch_logits[2]), other_prompts, strict=True):
        assert_close(logits, transformers_logits(reference, tokens))
    append_token(pipeline, chunked_context, 0)
    chunked_context.set_token_indices(active_idx=60)
    append_token(pipeline, long_context, 7)
    assert_close(step_logits(pipeline, [long_context, chunked_context])[1], expected[33:60])
    for position in range(60, 70):
        append_token(pipeline, chunked_context, TOKENS[position])
        assert_close(step_logits(pipeline, [chunked_context])[0], expected[position : position + 1])
    for context in (chunked_context, long_context, short_context):
        pipeline.release(context)


def test_prefix_hits_and_preemption_keep_the_greedy_tokens(
    pipeline: TextGenerationPipeline, reference: Any
) -> None:
    expected = transformers_greedy(reference, TOKENS, 12)
    assert generate_tokens(pipeline, [make_context(TOKENS, 12)], num_steps=4) == [expected]
    cached_context = make_context(TOKENS, 12)
    assert generate_tokens(pipeline, [make_context(TOKENS[:20], 3), cached_context])[1] == expected
    assert cached_context.num_cached_tokens == 64
    preempted_context = make_context(TOKENS, 12)
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += [output.next_token for output in pipeline.execute({"a": preempted_context})["a"].tokens]
    pipeline.release(preempted_context)
    preempted_context.reset()
    assert tokens + generate_tokens(pipeline, [preempted_context])[0] == expected


def test_tokens_with_drafts_equal_transformers(checkpoint: Path, reference: Any) -> None:
    prompt = TOKENS[:10] * 3
    pipeline = open_fallback(checkpoint, speculative_method="ngram", num_speculative_tokens=3)
    assert generate_tokens(pipeline, [make_context(prompt, 20)]) == [
        transformers_greedy(reference, prompt, 20)
    ]


def test_the_bfloat16_error_is_at_most_a_fifth_larger_than_in_transformers(
    checkpoint: Path, reference: Any
) -> None:
    expected = transformers_logits(reference, TOKENS[:40])
    pipeline = open_fallback(checkpoint, quantization_encoding="bfloat16")
    actual = step_logits(pipeline, [make_context(TOKENS[:40])])[0]
    reference_logits = transformers_logits(load_in_transformers(checkpoint).bfloat16(), TOKENS[:40])
    errors = [float((logits - expected).abs().median()) for logits in (actual, reference_logits)]
    assert errors[0] <= 1.2 * errors[1]


def test_a_window_that_is_one_too_large_is_detected(checkpoint: Path, reference: Any) -> None:
    pipeline = open_fallback(checkpoint)
    model: Any = pipeline.model
    windows = [group.window for group in model.kv_cache_spec.groups]
    if windows == [None]:
        pytest.skip("has no window")
    group = next(candidate for candidate in model.kv_cache_spec.groups if candidate.window is not None)
    object.__setattr__(group, "window", group.window + 1)
    manager: Any = pipeline.kv
    assert any(member.window == group.window for member in manager.spec.groups)
    if group.is_chunked:  # transformers does not pass the chunk size to the attention function
        logits = step_logits(pipeline, [make_context(TOKENS)])[0]
        assert float((logits - transformers_logits(reference, TOKENS)).abs().max()) > 0.01
    else:
        with pytest.raises(UnsupportedFeatureError, match=f"the window of the KV cache is {group.window}"):
            step_logits(pipeline, [make_context(TOKENS)])


# ---- selection ----


def resolve_architecture(folder: Path, impl: str, **config: Any) -> str:
    values = {"model_path": str(write_tiny_llm(folder, **config)), "model_impl": impl}
    architecture, _ = CATALOG.resolve(PipelineConfig.from_flat(values))
    return architecture.load_pipeline_model().__name__


def test_model_impl_selects_the_implementation(tmp_path: Path) -> None:
    assert (
        resolve_architecture(tmp_path, "auto") == resolve_architecture(tmp_path, "penstock") == "LlamaModel"
    )
    assert resolve_architecture(tmp_path, "transformers") == "TransformersModel"
    assert resolve_architecture(tmp_path, "auto", model_type="dots1") == "TransformersModel"
    with pytest.raises(UnknownArchitectureError, match="dots1"):
        resolve_architecture(tmp_path, "penstock", model_type="dots1")
    with pytest.raises(UnknownArchitectureError, match="no_such_type"):
        resolve_architecture(tmp_path, "auto", model_type="no_such_type")


def test_llm_generates_the_same_text_with_both_implementations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_llm(tmp_path)
    prompts = ["Hello", "The quick brown fox jumps over"]
    texts = []
    for impl in ("penstock", "transformers"):
        with caplog.at_level(logging.WARNING), LLM(str(folder), model_impl=impl) as llm:
            texts.append([output.text for output in llm.generate(prompts, SamplingParams(max_new_tokens=16))])
    assert texts[0] == texts[1]
    warnings = [
        record for record in caplog.records if "runs on its transformers implementation" in record.message
    ]
    assert len(warnings) == 1


def test_structured_output_works_with_the_fallback(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path)
    with LLM(str(folder), model_impl="transformers", enable_structured_output=True) as llm:
        grammar = Grammar("regex", "(yes|no), [0-9]{3}")
        (output,) = llm.generate("a", SamplingParams(max_new_tokens=30), grammar=grammar)
    assert re.fullmatch("(yes|no), [0-9]{3}", output.text)


def test_the_server_returns_the_text_of_llm(tmp_path: Path) -> None:
    folder = write_tiny_llm(tmp_path)
    prompts = ["Hello", "The quick brown fox"]
    with LLM(str(folder)) as llm:
        expected = [output.text for output in llm.generate(prompts, SamplingParams(max_new_tokens=12))]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "stream": True}
    streamed_texts = ["", ""]
    with (
        running_server(folder, "--model", str(folder), "--model-impl", "transformers") as url,
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed_texts[choice["index"]] += choice["text"]
    assert streamed_texts == expected
    assert all(expected)


# ---- refused models ----

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no attention interface": ("bloom", {"n_head": 4}, {}, "does not call the attention interface"),
    "recurrent": ("mamba", {}, {}, "it has (recurrent layers|layers of linear_attention)"),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, {}, "it has layers of conv"),
    "an encoder": ("t5", {"d_model": 32}, {}, "it has an encoder"),
    "dynamic rope": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {},
        "positions of rope type dynamic depend on the longest sequence",
    ),
    "adapters": ("llama", {}, {"enable_lora": True}, "enable_lora: adapters cannot be applied"),
    "determinism": ("llama", {}, {"deterministic": True}, "deterministic: the results of the module"),
    "int8": ("llama", {}, {"quantization_encoding": "int8"}, "llama does not run in 'int8'"),
    "quantized weights": (
        "llama",
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        {},
        "where quantized weights are not supported",
    ),
    "code": (
        "of_its_own",
        {"auto_map": {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"}},
        {},
        "trust_remote_code: of_its_own needs the Python code of its checkpoint",
    ),
    "an unknown type": ("of_its_own", {}, {}, "transformers cannot read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case: str, tmp_path: Path) -> None:
    model_type, config, settings, message = REFUSED[case]
    folder = write_tiny_llm(tmp_path, model_type=model_type, **config)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_fallback(folder, **settings)


REMOTE_CODE = {
    "configuration_own.py": """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = write_tiny_llm(tmp_path / "own", model_type="of_its_own", auto_map=AUTO_MAP)
    for name, text in REMOTE_CODE.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="trust_remote_code: of_its_own needs the Python code"):
        open_fallback(folder)
    remote = open_fallback(folder, trust_remote_code=True)
    llama = open_fallback(write_tiny_llm(tmp_path / "llama"), model_impl="penstock")
    logits = [step_logits(opened_pipeline, [make_context(TOKENS)])[0] for opened_pipeline in (remote, llama)]
    assert_close(*logits)


class _Module(torch.nn.Module):
    layer_idx = 0


def test_a_module_that_does_not_forward_arguments_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedFeatureError, match="does not pass keyword arguments to the attention"):
        paged_attention(_Module(), x, x, x, None)


def test_a_module_that_does_not_read_positions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    folder = write_tiny_llm(tmp_path)
    original_forward: Any = modeling_llama.LlamaRotaryEmbedding.forward

    def forward_without_position_ids(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original_forward(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", forward_without_position_ids)
    with pytest.raises(UnsupportedFeatureError, match="it does not read position_ids"):
        open_fallback(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY

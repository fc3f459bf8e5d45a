"""Extension points of a forward, with fake encodings, adapters, input embeddings, drafts and grammars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, write_checkpoint
from support.encodings import HalvedEncoding
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits

from penstock.driver import load_devices
from penstock.kernels import ENCODINGS, LoRAInputs
from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.weights import Weights

pytestmark = [pytest.mark.families, pytest.mark.models]

PROMPT = random_tokens(30, 130, seed=7)


@pytest.fixture(scope="module", params=DECODERS, ids=lambda architecture: architecture.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param.tiny_config())


@pytest.fixture(scope="module")
def shared_pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


@pytest.fixture
def pipeline(shared_pipeline: TextGenerationPipeline) -> Iterator[TextGenerationPipeline]:
    """Return the pipeline of the checkpoint. Afterwards, restore it and empty its prefix cache."""
    proposer, execute = shared_pipeline.proposer, shared_pipeline.model.execute
    yield shared_pipeline
    shared_pipeline.proposer = proposer
    shared_pipeline.model.execute = execute  # type: ignore[method-assign]
    shared_pipeline.kv.forget_prefixes()


# -- Encodings -------------------------------------------------------------------------------------------


@pytest.fixture
def halved_encoding() -> Iterator[None]:
    with ENCODINGS.extended(HalvedEncoding()):
        yield


@pytest.mark.usefixtures("halved_encoding")
def test_a_model_uses_an_added_encoding(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged_pipeline = open_pipeline(checkpoint)
    plain_logits, plain_reversed_logits = (
        step_logits(unchanged_pipeline, [make_context(prompt)])[0] for prompt in (PROMPT, PROMPT[::-1])
    )
    encoded_pipeline = open_pipeline(checkpoint, quantization_encoding="halved")
    torch.testing.assert_close(
        step_logits(encoded_pipeline, [make_context(PROMPT)])[0], plain_logits, atol=1e-4, rtol=1e-4
    )
    monkeypatch.setattr(HalvedEncoding, "unpack", lambda self, tensors: tensors["weight"])
    wrong_logits = step_logits(encoded_pipeline, [make_context(PROMPT[::-1])])[0]
    assert float((wrong_logits - plain_reversed_logits).abs().max()) > 0.1


# -- Adapters --------------------------------------------------------------------------------------------


class FakeLoRAManager:
    """A fake manager with one adapter, which applies to the linear layers ``names`` of the checkpoint."""

    def __init__(self, checkpoint: Path, names: Sequence[str]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device = load_devices(PipelineConfig.from_flat({}).model.devices)[0].torch_device
        self.matrices = {}
        for name in names:
            shape = Weights.open(checkpoint).shape(f"{name}.weight")
            out_features, in_features = reversed(shape) if is_transposed(name) else shape
            down_projection = torch.randn(1, 4, in_features, generator=generator) * 0.2
            up_projection = torch.randn(1, out_features, 4, generator=generator) * 0.2
            self.matrices[name] = (down_projection.to(self.device), up_projection.to(self.device))

    def digest(self, context: TextContext) -> bytes:
        return str(context.adapter).encode()

    def check(self, contexts: Sequence[TextContext]) -> None:
        pass

    def release(self, context: TextContext) -> None:
        pass

    def inputs(self, contexts: Sequence[TextContext], counts: np.ndarray) -> LoRAInputs | None:
        rows = np.array([-1 if context.adapter is None else 0 for context in contexts]).repeat(counts)
        return LoRAInputs(torch.from_numpy(rows).to(self.device), self.matrices)


def write_merged(checkpoint: Path, manager: FakeLoRAManager, folder: Path) -> Path:
    """Write the checkpoint with the adapter merged into its weights."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name, (down_projection, up_projection) in manager.matrices.items():
        delta = (up_projection[0] @ down_projection[0]).cpu()
        tensors[f"{name}.weight"] += delta.T if is_transposed(name) else delta
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder


def linear_names(checkpoint: Path) -> list[str]:
    # The names include layers of experts, and routers.
    suffixes = ("_proj", ".gate", ".router", ".w1", ".w2", ".w3")
    suffixes += (".dense", ".fc1", ".fc2", ".c_fc", ".query_key_value", ".dense_h_to_4h", ".dense_4h_to_h")
    names = Weights.open(checkpoint).names
    matrices = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [name for name in matrices if name.endswith(suffixes) or is_transposed(name)]


def is_transposed(name: str) -> bool:
    """Return whether a weight is stored as ``[in, out]``, as in GPT-2."""
    return name.startswith("transformer.") and name.endswith((".c_attn", ".c_proj", ".c_fc"))


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize(
    "selected", [slice(None), slice(1)], ids=["all linear layers", "one slice of a fused linear"]
)
def test_an_adapter_gives_the_logits_of_its_merged_weights(
    checkpoint: Path, pipeline: TextGenerationPipeline, selected: slice, tmp_path: Path
) -> None:
    manager = FakeLoRAManager(checkpoint, linear_names(checkpoint)[selected])
    adapted_pipeline = open_pipeline(checkpoint, members={"lora_manager": manager})
    merged_pipeline = open_pipeline(write_merged(checkpoint, manager, tmp_path))
    contexts = [make_context(PROMPT), make_context(PROMPT, adapter="tone"), make_context(PROMPT[:7])]
    plain_logits, adapted_logits, _ = step_logits(adapted_pipeline, contexts)
    expected = step_logits(merged_pipeline, [make_context(PROMPT)])[0]
    torch.testing.assert_close(adapted_logits, expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        plain_logits, step_logits(pipeline, [make_context(PROMPT)])[0], atol=1e-4, rtol=1e-4
    )
    assert float((adapted_logits - plain_logits).abs().max()) > 0.1


def test_an_adapter_applies_over_several_steps_and_separates_the_cache(checkpoint: Path) -> None:
    linears = [name for name in linear_names(checkpoint) if ".1." in name]
    manager = FakeLoRAManager(
        checkpoint, [name for name in linears if "attn" in name or ".attention." in name][:1]
    )
    members = {"lora_manager": manager}
    pipeline = open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16, members=members)
    contexts = [make_context(PROMPT, 20), make_context(PROMPT, 20, adapter="tone")]
    batch_tokens = generate_tokens(pipeline, contexts, num_steps=5)
    assert batch_tokens[0] != batch_tokens[1]
    for adapter, tokens in zip((None, "tone"), batch_tokens, strict=True):
        context = make_context(PROMPT, 20, adapter=adapter)
        assert generate_tokens(pipeline, [context]) == [tokens]
        assert context.num_cached_tokens == 16, "only blocks of the same adapter are reused"


def test_an_adapter_on_an_int8_model_does_not_change_rows_without_an_adapter(checkpoint: Path) -> None:
    manager = FakeLoRAManager(checkpoint, linear_names(checkpoint))
    options: dict[str, Any] = {"quantization_encoding": "int8", "deterministic": True}
    adapted_pipeline = open_pipeline(checkpoint, members={"lora_manager": manager}, **options)
    other_logits, adapted_logits = step_logits(
        adapted_pipeline, [make_context(PROMPT), make_context(PROMPT, adapter="tone")]
    )
    (plain_logits,) = step_logits(open_pipeline(checkpoint, **options), [make_context(PROMPT)])
    assert torch.equal(other_logits, plain_logits)
    assert float((adapted_logits - plain_logits).abs().max()) > 0.1


# -- Input embeddings ------------------------------------------------------------------------------------


def test_input_embeddings_replace_the_embeddings_of_tokens(pipeline: TextGenerationPipeline) -> None:
    model: Any = pipeline.model
    if getattr(model.network, "per_layer", None) is not None:
        pytest.skip("the per-layer embeddings depend on the token ids")
    expected = step_logits(pipeline, [make_context(PROMPT)])[0]
    masked_positions = [5, 6, 20]
    table = model.network.embedding.table
    masked_prompt = [0 if i in masked_positions else token for i, token in enumerate(PROMPT)]
    context = make_context(masked_prompt)
    kv: Any = pipeline.kv
    kv.claim(context)
    kv.reserve(context)
    inputs = model.prepare_initial_token_inputs([[context]], kv.inputs([context]), len(PROMPT))
    rows = table[[PROMPT[i] for i in masked_positions]] * model.network.embedding.scale
    embeddings = (torch.tensor(masked_positions, device=table.device), rows)
    outputs = model.execute(replace(inputs, input_embeds=embeddings))
    assert torch.equal(outputs.logits.cpu(), expected)
    assert not torch.allclose(model.execute(inputs).logits.cpu(), expected)


# -- Drafts ----------------------------------------------------------------------------------------------


class FixedProposer:
    """A proposer with fixed numbers of correct drafts and of wrong drafts after them."""

    def __init__(self, tokens_by_request: Mapping[str, list[int]], num_correct: int, num_wrong: int) -> None:
        self.tokens_by_request, self.num_correct, self.num_wrong = tokens_by_request, num_correct, num_wrong

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        drafts = []
        for context in contexts:
            next_tokens = self.tokens_by_request[context.request_id][len(context.generated_tokens) :]
            wrong_tokens = [
                (token + 1) % 130
                for token in next_tokens[self.num_correct : self.num_correct + self.num_wrong]
            ]
            drafts.append(next_tokens[: self.num_correct] + wrong_tokens)
        return drafts

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        pass

    def release(self, context: TextContext) -> None:
        pass


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize(("num_correct", "num_wrong"), [(0, 3), (4, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, top_k=20, seed=5)],
    ids=["greedy", "sampled"],
)
def test_speculation_gives_the_tokens_of_plain_decoding(
    pipeline: TextGenerationPipeline, num_correct: int, num_wrong: int, sampling: SamplingParams
) -> None:
    def contexts() -> list[TextContext]:
        fields = {"sampling_params": sampling}
        return [
            make_context(PROMPT, 20, request_id="long", **fields),
            make_context(PROMPT[:3], 11, request_id="short", **fields),
        ]

    plain_tokens = generate_tokens(pipeline, contexts())
    num_calls = 0
    pipeline.proposer = FixedProposer(
        dict(zip(("long", "short"), plain_tokens, strict=True)), num_correct, num_wrong
    )
    execute = pipeline.model.execute

    def count_execute(inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return execute(inputs)

    pipeline.model.execute = count_execute  # type: ignore[method-assign]
    assert generate_tokens(pipeline, contexts(), num_steps=3) == plain_tokens
    assert num_calls <= -(-20 // (num_correct + 1)) + 1


def test_drafts_do_not_exceed_the_length_of_a_context(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 3)])
    pipeline.proposer = FixedProposer({"a": plain_tokens + [0] * 50}, num_correct=50, num_wrong=0)
    assert generate_tokens(pipeline, [make_context(PROMPT, 3, request_id="a")]) == [plain_tokens]


def test_drafts_do_not_exceed_the_length_of_the_model(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16, max_length=34)
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 4)])
    pipeline.proposer = FixedProposer({"a": plain_tokens + [0] * 50}, num_correct=50, num_wrong=0)
    response = pipeline.execute({"a": make_context(PROMPT, 40, request_id="a")})["a"]
    assert [token.next_token for token in response.tokens] == plain_tokens


def test_drafts_of_another_context_do_not_change_log_probabilities(pipeline: TextGenerationPipeline) -> None:
    def scored_context(request_id: str) -> TextContext:
        return make_context(PROMPT[:9], 1, request_id=request_id, log_probabilities=2)

    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 8)])
    (single_tokens,) = pipeline.execute({"b": scored_context("b")})["b"].tokens
    pipeline.proposer = FixedProposer({"a": plain_tokens, "c": []}, num_correct=3, num_wrong=0)
    batch = {"a": make_context(PROMPT, 8, request_id="a"), "c": scored_context("c")}
    responses = pipeline.execute(batch)
    assert len(responses["a"].tokens) == 4
    assert responses["c"].tokens == [single_tokens]


# -- Grammars --------------------------------------------------------------------------------------------


class EvenTokenMatcher:
    """A matcher that allows only even token ids."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> bool:
        bitmask[index] = 0x55555555
        return True

    def is_terminated(self) -> bool:
        return False

    def find_jump_forward_string(self) -> str:
        return ""

    @property
    def stop_token_ids(self) -> list[int]:
        return []

    def accept_token(self, token: int) -> bool:
        self.accepted.append(token)
        return token % 2 == 0


def test_a_matcher_restricts_only_its_own_context(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 20)])
    context = make_context(PROMPT, 20)
    matcher: Any = EvenTokenMatcher()
    context.set_matcher(matcher)
    even_tokens, free_tokens = generate_tokens(pipeline, [context, make_context(PROMPT, 20)], num_steps=4)
    assert free_tokens == plain_tokens
    assert even_tokens == matcher.accepted
    assert all(token % 2 == 0 for token in even_tokens)
    assert even_tokens != plain_tokens

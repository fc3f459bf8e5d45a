"""`TextGenerationPipeline` with a small random Llama and with models that the tests define."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import (
    load_in_transformers,
    transformers_greedy,
    transformers_logits,
    write_checkpoint,
)
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.llama import tiny_config
from penstock.dtype import DType
from penstock.errors import (
    ConfigError,
    InputError,
    InsufficientBlocksError,
    TaskMismatchError,
    UnsupportedFeatureError,
)
from penstock.kernels import StepInputs
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVGroup
from penstock.nn import ReturnHiddenStates, ReturnLogits
from penstock.pipelines import (
    PIPELINE_REGISTRY,
    KVCacheConfig,
    KVCacheMixin,
    ModelInputs,
    ModelOutputs,
    PipelineConfig,
    PipelineModel,
    TextGenerationPipeline,
)
from penstock.pipelines.core import (
    EmbeddingsContext,
    Grammar,
    Pipeline,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TextGenerationStatus,
    TokenGenerator,
    TTSContext,
)

pytestmark = pytest.mark.models

PROMPT = random_tokens(30, 130, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), tiny_config())


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return load_in_transformers(checkpoint)


@pytest.fixture
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return open_pipeline(checkpoint, deterministic=True, kv_cache_block_size=16)


def test_the_pipeline_implements_its_protocols(pipeline: TextGenerationPipeline) -> None:
    as_pipeline: Pipeline[TextContext, Any] = pipeline
    assert as_pipeline.kv is pipeline.kv
    assert isinstance(pipeline, TokenGenerator)
    assert isinstance(pipeline.model, KVCacheMixin)


def test_an_empty_batch_gives_no_outputs(pipeline: TextGenerationPipeline) -> None:
    assert pipeline.execute({}) == {}
    assert pipeline.next_token({}, 3) == []


def test_next_token_returns_one_dict_per_step(pipeline: TextGenerationPipeline) -> None:
    short_context, long_context = make_context(PROMPT, 2), make_context(PROMPT[:9], 9)
    full_tokens = generate_tokens(pipeline, [make_context(PROMPT, 2), make_context(PROMPT[:9], 9)])
    steps = pipeline.next_token({"short": short_context, "long": long_context}, num_steps=2)
    assert [sorted(step) for step in steps] == [["long", "short"]] * 2
    assert [step["short"].next_token for step in steps] == full_tokens[0]
    assert short_context.status is TextGenerationStatus.MAXIMUM_LENGTH
    steps = pipeline.next_token({"long": long_context}, num_steps=100)
    assert len(steps) == 7, "the maximum length allows 7 more tokens"
    assert [step["long"].next_token for step in steps] == full_tokens[1][2:]


def test_greedy_and_sampled_tokens_do_not_depend_on_the_batch(pipeline: TextGenerationPipeline) -> None:
    def contexts() -> list[TextContext]:
        sampled_params = SamplingParams(temperature=1.0, top_k=-1, seed=3)
        return [
            make_context(PROMPT),
            make_context(PROMPT, sampling_params=sampled_params),
            make_context(PROMPT[:4]),
        ]

    batch_tokens = generate_tokens(pipeline, contexts(), num_steps=3)
    single_tokens = [generate_tokens(pipeline, [context])[0] for context in contexts()]
    assert batch_tokens == single_tokens
    assert batch_tokens[0] != batch_tokens[1]


def test_the_end_token_is_no_output_token_and_ends_the_context(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT)])
    end_token = next(token for token in plain_tokens[5:] if token not in plain_tokens[:5])
    end_index = plain_tokens.index(end_token)
    context = TextContext(
        prompt="", max_length=130, tokens=np.array(PROMPT, dtype=np.int64), eos_token_ids={end_token}
    )
    response = None
    tokens: list[int] = []
    while response is None or not response.is_done:
        response = pipeline.execute({"a": context}, num_steps=4)["a"]
        tokens += [int(token_response.next_token) for token_response in response.tokens]
    assert tokens == plain_tokens[:end_index]
    assert response.final_status is TextGenerationStatus.END_OF_SEQUENCE
    with pytest.raises(InputError, match="has ended"):
        pipeline.execute({"a": context})


def test_the_default_end_token_ends_contexts_without_one(
    checkpoint: Path, pipeline: TextGenerationPipeline
) -> None:
    """A context with `ignore_eos` does not end at the default end token."""
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT)])
    config = pipeline.config
    pipeline_with_end = TextGenerationPipeline(config, type(pipeline.model), plain_tokens[0])
    context = TextContext(prompt="", max_length=130, tokens=np.array(PROMPT, dtype=np.int64))
    response = pipeline_with_end.execute({"a": context})["a"]
    assert response.final_status is TextGenerationStatus.END_OF_SEQUENCE
    assert pipeline_with_end.execute({"a": make_context(PROMPT)})["a"].tokens[0].next_token == plain_tokens[0]


def test_min_new_tokens_delays_the_end(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT)])
    context = TextContext(
        prompt="",
        max_length=60,
        tokens=np.array(PROMPT, dtype=np.int64),
        eos_token_ids=set(plain_tokens),
        sampling_params=SamplingParams(min_new_tokens=7),
    )
    (tokens,) = generate_tokens(pipeline, [context], num_steps=3)
    assert len(tokens) >= 7
    assert not set(tokens[:7]) & set(plain_tokens)


def test_a_full_cache_raises_an_error_and_no_context_gets_a_token(checkpoint: Path) -> None:
    # float32 bytes * K and V * layers * kv heads * head dim * block size * blocks
    size = 4 * 2 * 3 * 2 * 8 * 16 * 5
    fixed_settings = {"kv_cache_block_size": 16, "max_length": 64, "max_batch_size": 2}
    small_pipeline = open_pipeline(checkpoint, kv_cache_memory=size, **fixed_settings)
    assert small_pipeline.kv.num_blocks == 4
    running_context, refused_context = make_context(PROMPT), make_context(PROMPT[::-1] + PROMPT)
    small_pipeline.execute({"a": running_context})
    with pytest.raises(InsufficientBlocksError, match="4 KV blocks are needed, 2 of 4 are free"):
        small_pipeline.execute({"a": running_context, "b": refused_context})
    assert len(running_context.generated_tokens) == 1
    assert not len(refused_context.generated_tokens)
    small_pipeline.release(refused_context)
    small_pipeline.execute({"a": running_context})
    small_pipeline.release(running_context)
    small_pipeline.release(running_context)
    small_pipeline.kv.check_integrity()
    assert small_pipeline.kv.num_free_blocks == 4


def test_the_number_of_steps_is_reduced_if_there_are_too_few_blocks(checkpoint: Path) -> None:
    size = 4 * 2 * 3 * 2 * 8 * 16 * 5
    fixed_settings = {"kv_cache_block_size": 16, "max_length": 64, "max_batch_size": 2}
    small_pipeline = open_pipeline(checkpoint, kv_cache_memory=size, **fixed_settings)
    contexts = {"a": make_context(PROMPT, 30), "b": make_context(PROMPT[::-1], 30)}
    responses = small_pipeline.execute(contexts, num_steps=20)
    assert [len(response.tokens) for response in responses.values()] == [1, 1]
    small_pipeline.release(contexts["a"])
    assert len(small_pipeline.execute({"b": contexts["b"]}, num_steps=20)["b"].tokens) == 20


def test_a_reduced_maximum_length_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = 4 * 2 * 3 * 2 * 8 * 16 * 5
    pipeline = open_pipeline(checkpoint, kv_cache_memory=size, kv_cache_block_size=16, max_batch_size=1)
    assert pipeline.model.max_seq_len == 64
    assert "the maximum length is 64 tokens, not the model's 256" in caplog.text


def test_a_refused_batch_changes_no_context(pipeline: TextGenerationPipeline) -> None:
    valid_context = make_context(PROMPT)
    refused_requests = [
        (make_context(PROMPT, adapter="tone"), UnsupportedFeatureError, "adapter 'tone'"),
        (make_context(PROMPT, grammar=Grammar("regex", "a+")), UnsupportedFeatureError, "regex grammar"),
        (make_context(random_tokens(300, 130)), InputError, "300 tokens.*256"),
    ]
    for context, error, message in refused_requests:
        with pytest.raises(error, match=message):
            pipeline.execute({"good": valid_context, "bad": context})
        assert not valid_context.is_assigned_to_cache
    with pytest.raises(InputError, match="num_steps must be at least 1, was 0"):
        pipeline.execute({"good": valid_context}, num_steps=0)
    with pytest.raises(InputError, match="twice in the batch"):
        pipeline.execute({"good": valid_context, "again": valid_context})


def test_images_and_unimplemented_log_probabilities_are_refused(pipeline: TextGenerationPipeline) -> None:
    image = TextAndVisionContext(
        prompt="", max_length=60, tokens=np.array(PROMPT), pixel_values=(np.zeros((3, 4, 4)),)
    )
    with pytest.raises(UnsupportedFeatureError, match="an image is not supported: LlamaModel reads text"):
        pipeline.execute({"a": image})
    pipeline.release(image)
    base = PipelineModel.compute_log_probabilities
    pipeline.model.compute_log_probabilities = partial(base, pipeline.model)  # type: ignore[method-assign]
    scored_context = make_context(PROMPT, log_probabilities=2)
    with pytest.raises(UnsupportedFeatureError, match="not implemented for LlamaModel"):
        pipeline.execute({"a": scored_context})
    assert not len(scored_context.generated_tokens)
    pipeline.release(scored_context)
    pipeline.kv.check_integrity()


def test_a_length_beyond_the_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"257.*256"):
        open_pipeline(checkpoint, max_length=257)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("chunks", [[], [11, 12]])
def test_log_probabilities_equal_transformers(
    pipeline: TextGenerationPipeline, reference: Any, echo: bool, chunks: list[int]
) -> None:
    context = make_context(PROMPT, 4, log_probabilities=3, log_probabilities_echo=echo)
    for chunk in chunks:
        context.set_token_indices(active_idx=context.start_idx + chunk)
        pipeline.execute({"a": context})
    entries = []
    while not context.is_done:
        entries += [token.log_probabilities for token in pipeline.execute({"a": context}, 4)["a"].tokens]
    tokens = context.all_tokens.tolist()
    expected = torch.log_softmax(transformers_logits(reference, tokens[:-1]), dim=-1)
    scores = [value for entry in entries for value in entry.token_log_probabilities]
    top_tokens = [top_entries for entry in entries for top_entries in entry.top_log_probabilities]
    first_position = 1 if echo else len(PROMPT)
    expected_scores = [float(expected[i - 1, tokens[i]]) for i in range(first_position, len(tokens))]
    assert scores == pytest.approx(expected_scores, abs=1e-3)
    for i, top_entries in enumerate(top_tokens, first_position):
        expected_top = set(expected[i - 1].topk(3).indices.tolist())
        assert set(top_entries) == expected_top | {tokens[i]}
    pipeline.release(context)


def test_penalties_change_only_the_tokens_of_their_request(pipeline: TextGenerationPipeline) -> None:
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT)])
    params = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    penalized_tokens, unpenalized_tokens = generate_tokens(
        pipeline, [make_context(PROMPT, sampling_params=params), make_context(PROMPT)]
    )
    assert unpenalized_tokens == plain_tokens
    assert len(set(penalized_tokens)) > len(set(plain_tokens))


@pytest.mark.parametrize(
    ("option", "num_rows"),
    [
        (ReturnHiddenStates.LAST, 2),
        (ReturnHiddenStates.ALL, 39),
        (ReturnHiddenStates.LAST_NORMALIZED, 2),
        (ReturnHiddenStates.ALL_NORMALIZED, 39),
    ],
)
def test_hidden_states_give_the_logits_of_transformers(
    pipeline: TextGenerationPipeline, reference: Any, option: ReturnHiddenStates, num_rows: int
) -> None:
    pipeline.model.return_hidden_states = option
    prompts = [PROMPT, PROMPT[:9]]
    outputs = run_once(pipeline, prompts)
    assert outputs.hidden_states.shape == (num_rows, 48)
    last_state = outputs.hidden_states[-1:]
    model: Any = pipeline.model
    step = StepInputs(pipeline.session.ops, torch.zeros(1), torch.zeros(2))
    with torch.inference_mode():
        normed_state = last_state if "NORMALIZED" in option.name else model.network.norm(last_state, step)
        logits = reference.lm_head(normed_state.cpu())
    torch.testing.assert_close(logits, transformers_logits(reference, prompts[1])[-1:], atol=1e-3, rtol=1e-4)


def test_return_logits_all_gives_every_row_and_does_not_change_generation(
    pipeline: TextGenerationPipeline, reference: Any
) -> None:
    pipeline.model.return_logits = ReturnLogits.ALL
    outputs = run_once(pipeline, [PROMPT, PROMPT[:9]])
    assert outputs.logit_offsets.tolist() == [0, 30, 39]
    torch.testing.assert_close(
        outputs.logits[30:].cpu(), transformers_logits(reference, PROMPT[:9]), atol=1e-3, rtol=1e-4
    )
    assert generate_tokens(pipeline, [make_context(PROMPT, 5)])[0] == transformers_greedy(
        reference, PROMPT, 5
    )


def test_return_logits_last_token_gives_one_row_per_sequence(pipeline: TextGenerationPipeline) -> None:
    arguments = {"pipeline": pipeline, "prompts": [PROMPT, PROMPT[:9]], "return_n_logits": 3}
    assert run_once(**arguments).logit_offsets.tolist() == [0, 3, 6]
    pipeline.model.return_logits = ReturnLogits.LAST_TOKEN
    assert run_once(**arguments).logit_offsets.tolist() == [0, 1, 2]


def test_tensors_of_custom_model_inputs_are_their_buffers() -> None:
    @dataclass(kw_only=True)
    class ListedInputs(ModelInputs):
        data: torch.Tensor

    class UnlistedInputs(ModelInputs):
        def __init__(self, data: torch.Tensor) -> None:
            self.data = data

    for inputs in (ListedInputs(data=torch.ones(2)), UnlistedInputs(torch.ones(2))):
        assert [buffer.tolist() for buffer in inputs.buffers] == [[1, 1]]
        assert "tokens=None" in repr(inputs)


def test_a_model_can_be_built_from_configuration_and_session(pipeline: TextGenerationPipeline) -> None:
    model = type(pipeline.model)(pipeline.config, pipeline.session)
    assert isinstance(model, KVCacheMixin)
    assert model.estimate_memory_footprint() > 0
    assert model.estimate_kv_cache_size(10**6) <= 10**6
    manager = model.load_kv_manager(pipeline.session, 10**6)
    assert isinstance(manager, KVCacheManager)
    assert sum(cache.nbytes for cache in manager.storage.caches) <= 10**6
    assert model.signal_buffers == []
    assert model.lora_manager is None
    assert model.dtype.value == "float32"


def test_the_argument_kv_cache_config_is_used(pipeline: TextGenerationPipeline) -> None:
    cache_config = KVCacheConfig(block_size=64, dtype="bfloat16", memory=10**6)
    model = type(pipeline.model)(pipeline.config, pipeline.session, kv_cache_config=cache_config)
    assert isinstance(model, KVCacheMixin)
    manager = model.load_kv_manager(pipeline.session, model.memory_plan.kv_cache_size)
    assert (manager.block_size, model.memory_plan.block_size) == (64, 64)
    assert manager.storage.caches[0].dtype is torch.bfloat16
    assert sum(cache.nbytes for cache in manager.storage.caches) == model.memory_plan.kv_cache_size <= 10**6


def test_a_weight_adapter_renames_tensors(checkpoint: Path, tmp_path: Path, reference: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    save_file({f"wrapped.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    config = PipelineConfig.from_flat({"model_path": str(tmp_path), "quantization_encoding": "float32"})
    architecture = PIPELINE_REGISTRY.retrieve_architecture(config.model.huggingface_config, tmp_path)
    base = architecture.load_pipeline_model()

    class UnwrappedModel(base):  # type: ignore[misc, valid-type]
        def __init__(self, pipeline_config: Any, session: Any) -> None:
            super().__init__(pipeline_config, session, adapter=lambda name: name.removeprefix("wrapped."))

    pipeline = TextGenerationPipeline(config, UnwrappedModel, -1)
    torch.testing.assert_close(
        step_logits(pipeline, [make_context(PROMPT)])[0],
        transformers_logits(reference, PROMPT),
        atol=1e-3,
        rtol=1e-4,
    )


def test_bfloat16_logits_are_close_to_float32(checkpoint: Path, reference: Any) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding="bfloat16")
    assert isinstance(pipeline.kv, KVCacheManager)
    assert pipeline.kv.storage.caches[0].dtype is torch.bfloat16
    logits = torch.log_softmax(step_logits(pipeline, [make_context(PROMPT)])[0], -1)
    reference_logits = torch.log_softmax(transformers_logits(reference, PROMPT), -1)
    assert float((reference_logits.exp() * (reference_logits - logits)).sum(-1).mean()) < 0.05


class SuccessorModel(PipelineModel[TextContext]):
    """A model with only the methods on the API page of `PipelineModel`. Token t + 1 follows token t."""

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: Any, huggingface_config: Any) -> int:
        return 64

    def prepare_initial_token_inputs(  # type: ignore[override]  # no parameter for drafts
        self, replica_batches: Any, kv_cache_inputs: Any = None, return_n_logits: Any = 1
    ) -> torch.Tensor:
        last_tokens = [context.next_tokens[-1] for batch in replica_batches for context in batch]
        return torch.tensor(last_tokens, device=self.devices[0].torch_device)

    def prepare_next_token_inputs(self, next_tokens: torch.Tensor, prev_model_inputs: Any) -> torch.Tensor:
        return next_tokens

    def execute(self, model_inputs: torch.Tensor) -> ModelOutputs:
        return ModelOutputs(logits=torch.eye(130, device=model_inputs.device)[model_inputs + 1])


def test_a_model_without_cache_may_return_only_logits(checkpoint: Path) -> None:
    config = PipelineConfig.from_flat({"model_path": str(checkpoint)})
    pipeline = TextGenerationPipeline(config, SuccessorModel, 9)
    tokens = generate_tokens(pipeline, [make_context([3, 1], 3), make_context([50], 4)], num_steps=2)
    assert tokens == [[2, 3, 4], [51, 52, 53, 54]]


def test_a_cache_created_by_the_model_gets_the_free_memory(checkpoint: Path) -> None:
    class ModelWithCache(SuccessorModel):
        def load_kv_manager(self, session: Any, available_cache_memory: int) -> KVCacheManager:
            self.cache_memory = available_cache_memory
            group = KVGroup((0,), 1, 4, DType.float32)
            return KVCacheManager(KVCacheSpec((group,)), [5], 16)

        def estimate_kv_cache_size(self, available_cache_memory: int) -> int:
            return available_cache_memory

    config = PipelineConfig.from_flat({"model_path": str(checkpoint)})
    pipeline = TextGenerationPipeline(config, ModelWithCache, 9)
    model: Any = pipeline.model
    assert model.cache_memory == model.estimate_memory_footprint() > 0
    assert generate_tokens(pipeline, [make_context([3, 1], 2)]) == [[2, 3]]


def test_a_context_of_another_task_is_refused(pipeline: TextGenerationPipeline) -> None:
    class MyContext(TextContext):
        pass

    assert len(generate_tokens(pipeline, [MyContext(prompt="", max_length=9, tokens=np.array([1]))])[0]) == 8
    options = {"prompt": "", "max_length": 9, "tokens": np.array([1]), "request_id": "7"}
    for context in (TTSContext(**options), EmbeddingsContext(**options)):
        message = f"request 7, a {type(context).__name__}, .* loaded for text-generation"
        for call in (lambda it: pipeline.execute({"7": it}), pipeline.ready):
            with pytest.raises(TaskMismatchError, match=message):
                call(context)
        assert not context.is_assigned_to_cache


def test_a_speech_context_ends_with_its_last_token(
    pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline gets the context type of its subclass for speech tokens."""
    (plain_tokens,) = generate_tokens(pipeline, [make_context(PROMPT, 2)])
    monkeypatch.setattr(type(pipeline), "context_types", (TTSContext,))
    context = TTSContext(prompt="", max_length=len(PROMPT) + 2, tokens=np.array(PROMPT), ignore_eos=True)
    response = pipeline.execute({"a": context}, num_steps=5)["a"]
    assert [token.next_token for token in response.tokens] == plain_tokens
    assert response.final_status is TextGenerationStatus.MAXIMUM_LENGTH
    assert not context.is_done
    with pytest.raises(InputError, match="has ended"):
        pipeline.execute({"a": context})
    pipeline.release(context)


def run_once(pipeline: TextGenerationPipeline, prompts: list[list[int]], return_n_logits: int = 1) -> Any:
    contexts = [make_context(prompt) for prompt in prompts]
    kv: Any = pipeline.kv
    for context in contexts:
        kv.claim(context)
        kv.reserve(context)
    outputs = pipeline.model.execute(
        pipeline.model.prepare_initial_token_inputs([contexts], kv.inputs(contexts), return_n_logits)
    )
    for context in contexts:
        pipeline.release(context)
    return outputs

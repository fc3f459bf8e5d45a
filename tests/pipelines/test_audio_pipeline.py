"""Audio pipelines with a random Llama and a fake codec: the audio does not depend on the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.codecs import CODEC_REFERENCES, REFERENCES, load_reference
from support.tiny_speech import CODES_PER_FRAME, FakeCodec, fake_codec_catalog, write_tiny_speech

from penstock.assembly import load_pipeline, load_scheduler, load_tokenizer
from penstock.codecs import CodecChunk
from penstock.config import PipelineConfig
from penstock.errors import InputError, RequestFailedError
from penstock.pipelines.audio import AudioGeneratorPipeline, ChunkSizes
from penstock.pipelines.core import (
    AudioGenerationRequest,
    AudioGenerator,
    SamplingParams,
    TextGenerationStatus,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from penstock.text.speech_tokenizer import SpeechTokenizer

CATALOG = fake_codec_catalog()
LONG_TEXT = "a sentence that fills more than one block of the cache"
TEXTS = (LONG_TEXT, "hello", LONG_TEXT + "!", "a b c d e")


class SpeechModel:
    """A speech checkpoint with its tokenizer and pipeline."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = PipelineConfig.from_flat(
            {"model_path": str(folder), "kv_cache_memory": 1 << 20, **settings}
        )
        self.tokenizer: SpeechTokenizer = load_tokenizer(self.config, CATALOG)
        self.pipeline: Any = load_pipeline(self.config, self.tokenizer, CATALOG)
        self.tokenizer.max_length = self.pipeline.memory_plan.max_length

    def context(self, name: str, text: str = "hello", **fields: Any) -> TTSContext:
        streaming = fields.pop("streaming", True)
        options = {"seed": sum(name.encode()), "top_k": -1, "temperature": 1, "max_new_tokens": 90}
        options |= fields.pop("params", {})
        params = SamplingParams(**{"min_new_tokens": min(30, options["max_new_tokens"]), **options})
        return self.tokenizer.build_speech_context(
            AudioGenerationRequest(
                name, 0, "m", input=text, sampling_params=params, streaming=streaming, **fields
            )
        )

    def run(self, contexts: Sequence[TTSContext], num_steps: int = 1) -> dict[str, list[np.ndarray]]:
        """Run contexts in a scheduler and return the audio chunks of each context."""
        self.scheduler = load_scheduler(self.config, self.pipeline)
        for context in contexts:
            self.scheduler.submit(context)
        chunks: dict[str, list[np.ndarray]] = {context.request_id: [] for context in contexts}
        while self.scheduler.has_work:
            for name, output in self.scheduler.step(num_steps).items():
                if output.has_audio_data:
                    chunks[name].append(output.audio_data)
            assert not self.scheduler.failures, self.scheduler.failures
        return chunks


def decode_at_once(model: SpeechModel, context: TTSContext) -> np.ndarray:
    """Return the audio of all speech tokens of a context, decoded in one call."""
    codes = torch.from_numpy(context.speech_tokens.astype(np.int64))
    frames = codes.view(-1, model.pipeline.codec.codes_per_frame)
    [samples] = model.pipeline.codec.decode_chunks([CodecChunk(frames)])
    return samples.numpy()


@pytest.fixture(scope="module", params=[*CODES_PER_FRAME])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    return SpeechModel(write_tiny_speech(folder, request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_speech(tmp_path_factory.mktemp("model"))


@pytest.fixture
def restored_chunk_sizes(model: SpeechModel) -> Iterator[None]:
    previous_value = model.pipeline._stream_sizes
    yield
    model.pipeline._stream_sizes = previous_value


@pytest.mark.usefixtures("restored_chunk_sizes")
@pytest.mark.parametrize("num_steps", [1, 8])
def test_streamed_audio_equals_decoding_at_once_for_each_chunk_size(
    model: SpeechModel, num_steps: int
) -> None:
    for chunk_frames in (1, 2, 3, 5, 8, 13, 200):
        model.pipeline._stream_sizes = ChunkSizes(chunk_frames, chunk_frames)
        context = model.context(f"r{chunk_frames}")
        [chunks] = model.run([context], num_steps).values()
        expected = decode_at_once(model, context)
        assert len(expected) > 20
        np.testing.assert_array_equal(np.concatenate(chunks), expected)
        sizes = [len(chunk) // FakeCodec.samples_per_frame for chunk in chunks]
        if num_steps == 1:
            assert all(size == chunk_frames for size in sizes[:-1])


def test_audio_of_a_batch_equals_that_of_single_requests(model: SpeechModel) -> None:
    contexts = [model.context(f"r{i}", text) for i, text in enumerate(TEXTS)]
    batch_audio = model.run(contexts, 4)
    for i, text in enumerate(TEXTS):
        single_context = model.context(f"r{i}", text)
        [single_chunks] = model.run([single_context]).values()
        assert len(single_chunks) == len(batch_audio[f"r{i}"]), "the chunks end at the same frames"
        for single_chunk, batch_chunk in zip(single_chunks, batch_audio[f"r{i}"], strict=True):
            np.testing.assert_array_equal(single_chunk, batch_chunk)
        assert single_context.num_dropped_tokens == contexts[i].num_dropped_tokens


@pytest.mark.parametrize(
    "settings", [{"kv_cache_memory": 26 << 12, "kv_cache_block_size": 16}, {"max_batch_input_tokens": 20}]
)
def test_preemption_and_chunked_prompts_do_not_change_the_audio(
    folder: Path, settings: dict[str, Any]
) -> None:
    default_model, limited_model = SpeechModel(folder), SpeechModel(folder, **settings)
    params = {"max_new_tokens": 150, "min_new_tokens": 100}
    expected = default_model.run(
        [default_model.context(f"r{i}", text, params=params) for i, text in enumerate(TEXTS)]
    )
    result = limited_model.run(
        [limited_model.context(f"r{i}", text, params=params) for i, text in enumerate(TEXTS)], 3
    )
    assert limited_model.scheduler.num_preemptions > 0 or "max_batch_input_tokens" in settings
    for name, chunks in expected.items():
        np.testing.assert_array_equal(np.concatenate(result[name]), np.concatenate(chunks))


def test_a_cached_prompt_does_not_change_the_audio(folder: Path) -> None:
    model = SpeechModel(folder)
    first_context, second_context = (model.context("a", LONG_TEXT) for _ in range(2))
    [uncached_audio] = model.run([first_context]).values()
    [cached_audio] = model.run([second_context]).values()
    assert first_context.num_cached_tokens == 0
    assert second_context.num_cached_tokens >= 32
    np.testing.assert_array_equal(np.concatenate(cached_audio), np.concatenate(uncached_audio))


def test_a_context_with_only_audio_left_needs_no_batch_row_and_no_blocks(folder: Path) -> None:
    model = SpeechModel(folder, audio_chunk_frames=4)
    pipeline, codec = model.pipeline, model.pipeline.codec
    pipeline._max_frames = 4
    scheduler = load_scheduler(model.config, pipeline)
    finishing_context, running_context = model.context("a", params={"max_new_tokens": 40}), model.context("b")
    running_context.eos_token_ids.clear()
    running_context.ignore_eos = True
    scheduler.submit(finishing_context)
    scheduler.submit(running_context)
    scheduler.step(1)
    num_chunks = 0
    while not finishing_context.is_done:
        length_before, frames_before = running_context.current_length, codec.num_frames
        was_generating = not finishing_context.speech_token_status.is_done
        scheduler.step(8)
        if not was_generating:
            num_chunks += 1
            assert scheduler.last_batch == (2, 1)
            assert running_context.current_length > length_before
            assert codec.num_frames > frames_before
            assert not finishing_context.is_assigned_to_cache
    assert num_chunks > 2
    scheduler.cancel("b")
    scheduler.step()
    assert not scheduler.has_work
    assert pipeline.kv.num_free_blocks == pipeline.kv.num_blocks


def test_a_context_with_only_audio_left_is_never_preempted(folder: Path) -> None:
    """The scheduler preempts the latest request first, except if all its tokens are generated."""
    model = SpeechModel(folder, audio_chunk_frames=1, kv_cache_memory=22 << 12, kv_cache_block_size=16)
    model.pipeline._max_frames = 1
    scheduler = model.scheduler = load_scheduler(model.config, model.pipeline)
    token_counts = (220, 220, 220, 30)
    contexts = [
        model.context(f"r{i}", params={"max_new_tokens": count, "ignore_eos": True})
        for i, count in enumerate(token_counts)
    ]
    for context in contexts:
        scheduler.submit(context)
    chunks: dict[str, list[np.ndarray]] = {context.request_id: [] for context in contexts}
    num_preemptions_seen = 0
    while scheduler.has_work:
        had_audio_left = contexts[3].generation_status.is_done and not contexts[3].is_done
        preemptions_before = scheduler.num_preemptions
        for name, output in scheduler.step(8).items():
            if output.has_audio_data:
                chunks[name].append(output.audio_data)
        assert not scheduler.failures
        if had_audio_left:
            num_preemptions_seen += scheduler.num_preemptions > preemptions_before
            assert "r3" in scheduler._running or contexts[3].is_done
    assert num_preemptions_seen, "no context was preempted while the last context had audio left"
    for context in contexts:
        np.testing.assert_array_equal(
            np.concatenate(chunks[context.request_id]), decode_at_once(model, context)
        )


def test_a_context_with_only_audio_left_is_not_preempted_for_another_client(folder: Path) -> None:
    model = SpeechModel(folder, audio_chunk_frames=2, max_batch_size=3)
    model.pipeline._max_frames = 1
    scheduler = load_scheduler(model.config, model.pipeline)
    token_counts = (200, 200, 30)
    for i, count in enumerate(token_counts):
        context = model.context(f"r{i}", params={"max_new_tokens": count, "ignore_eos": True})
        context.client_id = "a"
        scheduler.submit(context)
    last_context = context
    while not last_context.generation_status.is_done:
        scheduler.step(8)
    assert not last_context.is_done
    other_context = model.context("other", params={"max_new_tokens": 10, "ignore_eos": True})
    other_context.client_id = "b"
    scheduler.submit(other_context)
    for _ in range(5):
        scheduler.step(1)
        assert "r2" in scheduler._running
    assert scheduler.num_preemptions == 1
    assert "r1" not in scheduler._running, "the last generating context is preempted"


def test_cancelled_requests_free_their_blocks(folder: Path) -> None:
    model = SpeechModel(folder)
    scheduler = load_scheduler(model.config, model.pipeline)
    for i in range(6):
        scheduler.submit(model.context(f"r{i}"))
    for i in range(6):
        scheduler.step(2)
        scheduler.cancel(f"r{i}")
    scheduler.step()
    assert not scheduler.has_work
    assert model.pipeline.kv.num_free_blocks == model.pipeline.kv.num_blocks


def test_the_audio_status_is_the_reason_why_the_tokens_ended(folder: Path) -> None:
    model = SpeechModel(folder)
    truncated_context = model.context("a", params={"max_new_tokens": 20})
    finished_context = model.context("b", params={"max_new_tokens": 200})
    model.run([truncated_context, finished_context])
    assert truncated_context.audio_generation_status is TextGenerationStatus.MAXIMUM_LENGTH
    assert finished_context.audio_generation_status is TextGenerationStatus.END_OF_SEQUENCE
    assert len(truncated_context.speech_tokens) == 20
    assert len(finished_context.speech_tokens) == len(finished_context.generated_tokens) - 1


def test_an_incomplete_last_frame_is_dropped(tmp_path: Path) -> None:
    model = SpeechModel(write_tiny_speech(tmp_path / "m", "orpheus"))
    context = model.context("a", params={"max_new_tokens": 20, "ignore_eos": True})
    [chunks] = model.run([context]).values()
    num_dropped = context.num_dropped_tokens
    assert num_dropped >= 20 % 3
    assert sum(map(len, chunks)) == (20 - num_dropped) // 3 * FakeCodec.samples_per_frame


def test_an_output_without_speech_codes_is_an_error(tmp_path: Path) -> None:
    model = SpeechModel(write_tiny_speech(tmp_path / "m", "orpheus"))
    context = model.context("a", params={"max_new_tokens": 7, "allowed_token_ids": [65, 66]})
    scheduler = load_scheduler(model.config, model.pipeline)
    scheduler.submit(context)
    while scheduler.has_work:
        scheduler.step()
    message = r"7 tokens without a whole frame of speech \(3 codes\); 7 tokens were dropped"
    with pytest.raises(RequestFailedError, match=message):
        raise scheduler.failures["a"]


def test_a_codec_failure_ends_only_requests_with_the_refused_code(folder: Path) -> None:
    model = SpeechModel(folder, audio_chunk_frames=10)
    contexts = [model.context(f"r{i}", params={"max_new_tokens": 40}) for i in range(5)]
    expected = model.run(contexts)
    failing_context = contexts[0]
    other_codes = [set(context.speech_tokens.tolist()) for context in contexts[1:]]
    failing_codes = set(failing_context.speech_tokens.tolist())
    refused_code = next(code for code in failing_codes)
    model.pipeline.codec.refused_codes = {refused_code}
    try:
        scheduler = load_scheduler(model.config, model.pipeline)
        for i in range(5):
            scheduler.submit(model.context(f"r{i}", params={"max_new_tokens": 40}))
        chunks: dict[str, list[np.ndarray]] = {}
        while scheduler.has_work:
            for name, output in scheduler.step(4).items():
                if output.has_audio_data:
                    chunks.setdefault(name, []).append(output.audio_data)
    finally:
        model.pipeline.codec.refused_codes = set()
    failed_names = {"r0", *(f"r{i}" for i, codes in enumerate(other_codes, 1) if refused_code in codes)}
    assert set(scheduler.failures) == failed_names
    for name, audio in expected.items():
        if name not in failed_names:
            np.testing.assert_array_equal(np.concatenate(chunks[name]), np.concatenate(audio))
    assert model.pipeline.kv.num_free_blocks == model.pipeline.kv.num_blocks


def test_next_chunk_returns_the_audio_of_all_tokens(model: SpeechModel) -> None:
    pipeline: AudioGeneratorPipeline = model.pipeline
    assert isinstance(pipeline, AudioGenerator)
    assert pipeline.decoder_sample_rate == FakeCodec.sample_rate
    contexts = {name: model.context(name) for name in ("a", "b")}
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in contexts}
    running_contexts = dict(contexts)
    while running_contexts:
        length_before = {name: context.current_length for name, context in running_contexts.items()}
        for name, output in pipeline.next_chunk(running_contexts, 24).items():
            assert running_contexts[name].current_length - length_before[name] <= 24
            if output.has_audio_data:
                chunks[name].append(output.audio_data)
            if output.is_done:
                pipeline.release(running_contexts.pop(name))
    for name, context in contexts.items():
        assert len(chunks[name]) >= 2
        np.testing.assert_array_equal(np.concatenate(chunks[name]), decode_at_once(model, context))
    with pytest.raises(InputError, match=r"request a has ended"):
        pipeline.next_chunk({"a": contexts["a"]}, 1)
    with pytest.raises(InputError, match="num_tokens must be at least 1, was 0"):
        pipeline.next_chunk({"a": model.context("c")}, 0)
    assert pipeline.next_chunk({}, 3) == {}


def test_the_number_of_next_speech_tokens_is_limited_per_request(model: SpeechModel) -> None:
    speech_lm_pipeline = model.pipeline.speech_lm_pipeline
    contexts = {name: model.context(name, params={"ignore_eos": True}) for name in ("a", "b", "c")}
    outputs = speech_lm_pipeline.next_speech_token(contexts, 10, {"a": 3, "b": 0, "c": 100})
    assert {name: len(output.tokens) for name, output in outputs.items()} == {"a": 3, "c": 10}
    assert len(contexts["b"].generated_tokens) == 0
    assert speech_lm_pipeline.next_speech_token(contexts, 0, {"a": 3, "b": 3, "c": 3}) == {}
    assert speech_lm_pipeline.next_speech_token({}, 4, {}) == {}
    with pytest.raises(InputError, match="no number for the request a"):
        speech_lm_pipeline.next_speech_token({"a": contexts["a"]}, 1, {})
    for context in contexts.values():
        speech_lm_pipeline.release(context)


def test_speech_tokens_can_be_generated_without_a_codec(folder: Path) -> None:
    model = SpeechModel(folder, task="speech-token-generation")
    context = model.context("a", params={"max_new_tokens": 200})
    scheduler = load_scheduler(model.config, model.pipeline)
    scheduler.submit(context)
    tokens = []
    while scheduler.has_work:
        for output in scheduler.step(5).values():
            tokens += [token.next_token for token in output.tokens]
    assert tokens == context.generated_tokens[:-1].tolist()
    assert len(context.speech_tokens) == len(tokens)
    assert context.speech_token_status is TextGenerationStatus.END_OF_SEQUENCE


def test_a_context_can_be_serialized(folder: Path) -> None:
    model = SpeechModel(folder)
    context = model.context("a")
    decoded_context = msgpack_numpy_decoder(TTSContext)(msgpack_numpy_encoder()(context))
    assert decoded_context == context
    assert decoded_context.streaming
    [audio], [expected] = model.run([decoded_context]).values(), model.run([model.context("a")]).values()
    np.testing.assert_array_equal(np.concatenate(audio), np.concatenate(expected))


def test_a_codec_that_does_not_match_the_speech_format_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_speech(tmp_path / "m", "orpheus")
    other_codec = write_tiny_speech(tmp_path / "n", "neutts") / "codec"
    with pytest.raises(ValueError, match=r"1 codes per frame, each from 0 to 15, .*'orpheus' has 3 codes"):
        SpeechModel(folder, codec=str(other_codec))


@pytest.mark.parametrize("name", ["snac", "neucodec"])
def test_real_codecs_stream_within_their_tolerance(name: str, tmp_path: Path) -> None:
    codec = next(reference_name for reference_name in REFERENCES if reference_name.startswith(name))
    speech_format, num_codes = {"snac": ("orpheus", 7), "neucodec": ("neutts", 1)}[name]
    if name == "snac":
        num_codes = load_reference(codec).codes_per_frame
    folder = write_tiny_speech(tmp_path / "m", speech_format, num_codes=num_codes, max_characters=60)
    model = SpeechModel(folder, codec=str(CODEC_REFERENCES / codec))
    params = {"max_new_tokens": 150, "min_new_tokens": 140}
    for chunk_frames in (3, 16):
        model.pipeline._stream_sizes = ChunkSizes(chunk_frames, 2 * chunk_frames)
        context = model.context(f"r{chunk_frames}", params=params)
        [chunks] = model.run([context], 4).values()
        audio, expected = np.concatenate(chunks), decode_at_once(model, context)
        assert len(chunks) > 1
        assert len(audio) == len(expected) > 0
        np.testing.assert_allclose(audio, expected, rtol=0, atol=model.pipeline.codec.tolerance)

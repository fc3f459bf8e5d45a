"""From a configuration to the parts that run it: what `LLM` drives itself and the server's worker is given.

A composition root, like ``llm.py`` and ``cli``: here alone tokenizer, model, cache and scheduler meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.config import PipelineConfig
from penstock.driver import CPU
from penstock.errors import ConfigError, PenstockError
from penstock.host.memory import prefaulted_memory
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler
from penstock.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipelines.text_generation import PipelineModel, TextGenerationPipeline
    from penstock.worker.process import WorkerRuntime


def load_tokenizer(config: PipelineConfig) -> TextTokenizer:
    """The tokenizer of the configured model; it loads no torch. Its ``max_length`` is the checkpoint's own
    until whoever has planned the memory sets it.

    Raises:
        CheckpointError: the tokenizer is missing or damaged.
        ConfigError: the chat template that is configured is not a template.
    """
    return TextTokenizer(
        config.model.checkpoint,
        chat_template=config.model.chat_template,
        special_tokens_in_content=config.model.special_tokens_in_content,
    )


@contextmanager
def memory_of_weights(config: PipelineConfig) -> Iterator[None]:
    """For the time of a load: has memory found for the weights that are going to be packed, which goes on
    while libraries are imported. Begin with it."""
    from penstock.memory import estimate_packed_size

    size, device = 0, config.model.devices[0]
    with suppress(PenstockError):  # of a model that cannot be loaded, which the load tells
        if device.device_type == "cpu" and not config.model.packed_key.file.is_file():
            size = estimate_packed_size(config)
    has_room = size < CPU().stats["free_memory"] * _PREFAULT_SHARE
    with prefaulted_memory(size if size > _MIN_PREFAULTED and has_room else 0):
        yield


_MIN_PREFAULTED = 64 << 20
"""Bytes. Less is found in no time."""
_PREFAULT_SHARE = 0.7
"""Of the memory that is free. What takes more is left to the planner, which may have to refuse it."""


def load_pipeline(config: PipelineConfig, tokenizer: TextTokenizer) -> TextGenerationPipeline:
    """The pipeline of the configured model, its weights loaded and its memory shared out.

    Raises:
        CheckpointError: the model cannot be loaded.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
    """
    from penstock.grammar import GrammarCompiler
    from penstock.pipelines.text_generation import TextGenerationPipeline

    model = _load_model(config)
    eos = tokenizer.eos if tokenizer.eos_token_ids else None
    if config.speculative.method is None:
        pipeline = TextGenerationPipeline(config, model, eos)
    else:
        pipeline = _load_speculating(config, model, eos)
    if config.structured_output.enable:
        pipeline.grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, config=config.structured_output)
    return pipeline


def check_checkpoint(config: PipelineConfig) -> TextTokenizer:
    """Sees that the configured model can be loaded, without reading its weights: its architecture, its
    encoding, its tokenizer, and every tensor's name and shape.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: it cannot be loaded; of tensors, lists all that are at fault.
        ConfigError: it cannot run in its encoding, or the chat template that is configured is none.
    """
    import torch

    from penstock.architectures.decoder import DecoderModel
    from penstock.kernels import encoding_named
    from penstock.nn import Loader
    from penstock.weights import Weights

    tokenizer = load_tokenizer(config)
    model = _load_model(config)
    assert issubclass(model, DecoderModel)
    weights = Weights.open(config.model.checkpoint, shapes_only=True)
    length = model.calculate_max_seq_len(config, config.model.huggingface_config)
    with torch.no_grad():
        kind = encoding_named(config.model.encoding)
        loader = Loader(weights, kind.compute_dtype.value, torch.device("meta"))  # nothing is to be quantised
        model.build(loader, config.model.huggingface_config, length)
    weights.finish(model.ignored_weights)
    return tokenizer


def pack_checkpoint(config: PipelineConfig) -> Path:
    """Packs the weights of the configured model, and keeps them where its loads find them.

    Returns:
        The file.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: its device has no packed form that could be kept.
        OSError: the file cannot be written.
    """
    from penstock.architectures.decoder import DecoderModel
    from penstock.calibration import CALIBRATED
    from penstock.driver import load_devices
    from penstock.engine import InferenceSession
    from penstock.nn import Loader
    from penstock.weights import Weights
    from penstock.weights.packed_weights import write_packed

    model = _load_model(config)
    assert issubclass(model, DecoderModel)
    devices = load_devices(config.model.devices)
    ops = InferenceSession(devices, num_threads=config.num_threads).ops
    if ops.layout != "panels":
        raise ConfigError("devices", f"nothing is packed for the {ops.name} kernels: leave out --pack")
    weights = Weights.open(config.model.checkpoint)
    length = model.calculate_max_seq_len(config, config.model.huggingface_config)
    loader = Loader(weights, config.model.encoding, devices[0].torch_device, ops, later=CALIBRATED)
    network = model.read(weights, loader, config.model.huggingface_config, length)
    model.calibrate(config, network, loader.layers, ops)
    return write_packed(config.model.packed_key, loader.layers)


def _load_model(config: PipelineConfig) -> type[PipelineModel[Any]]:
    """The class of the configured model."""
    from penstock.architectures.registry import PIPELINE_REGISTRY

    architecture = PIPELINE_REGISTRY.retrieve_architecture(
        config.model.huggingface_config, config.model.checkpoint, encoding=config.model.encoding
    )
    return architecture.load_pipeline_model()


def _load_speculating(
    config: PipelineConfig, model: type[PipelineModel[Any]], eos: int | None
) -> TextGenerationPipeline:
    """A pipeline that drafts tokens, by a draft model or from the text itself."""
    from penstock.driver import load_devices
    from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength, NGramProposer
    from penstock.pipelines.speculative.draft_model import DraftModelProposer, draft_config, share_memory
    from penstock.pipelines.text_generation import TextGenerationPipeline

    speculative = config.speculative
    width = AdaptiveDraftLength if speculative.adaptive_speculation else FixedDraftLength
    widths = width(speculative.num_speculative_tokens)
    if speculative.method == "ngram":
        proposer = NGramProposer(speculative.ngram_min, speculative.ngram_max)
        return TextGenerationPipeline(config, model, eos, proposer=proposer, widths=widths)
    draft = _load_model(draft_config(config))
    free_memory = sum(device.stats["free_memory"] for device in load_devices(config.model.devices))
    config, drafting = share_memory(config, model, draft, free_memory=free_memory)
    pipeline = TextGenerationPipeline(config, model, eos, widths=widths)
    vocabulary = config.model.huggingface_config.vocabulary_size
    pipeline.proposer = DraftModelProposer(drafting, draft, pipeline.session, vocabulary)
    return pipeline


def load_scheduler(
    config: PipelineConfig, pipeline: TextGenerationPipeline, *, isolates_faults: bool = False
) -> Scheduler[TextContext, TextGenerationResponse]:
    """The scheduler that drives a pipeline within the limits that its memory was planned for.

    Args:
        config: the configuration.
        pipeline: made of the same.
        isolates_faults: as of `Scheduler`; without it a fault of ours reaches the caller as it is.
    """
    plan = pipeline.memory_plan
    return Scheduler(
        pipeline,
        max_batch_size=plan.max_batch_size,
        max_batch_input_tokens=plan.max_batch_input_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        ready=pipeline.ready,
        isolates_faults=isolates_faults,
    )


def load_work(config: PipelineConfig) -> WorkerRuntime:
    """What the server's worker works with. Called in the worker's process, as
    ``functools.partial(load_work, config)``, and timed phase by phase.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: the configuration does not go together with the model.
        InsufficientMemoryError: weights and the smallest useful KV cache do not fit.
    """
    times = [perf_counter()]
    with memory_of_weights(config):
        tokenizer = load_tokenizer(config)  # first: a model that is not there is noticed at once
        times.append(perf_counter())
        import penstock.pipelines.text_generation  # noqa: F401  # torch and its like, which take longest

        times.append(perf_counter())
        pipeline = load_pipeline(config, tokenizer)
    scheduler = load_scheduler(config, pipeline, isolates_faults=True)
    times.append(perf_counter())
    seconds = [end - begin for begin, end in pairwise(times)]
    return _as_work(config, pipeline, scheduler, list(zip(_PHASES, seconds, strict=True)))


_PHASES = ("tokenizer", "libraries", "model")
STREAMING_LATENCY_BUDGET = 0.02
"""Seconds that a step of the scheduler may take where nobody says how many tokens a request is to gain: so
long those who come have to wait, and so long tokens that are streamed may stand together."""


def _as_work(
    config: PipelineConfig,
    pipeline: TextGenerationPipeline,
    scheduler: Scheduler[TextContext, TextGenerationResponse],
    startup: list[tuple[str, float]],
) -> WorkerRuntime:
    from penstock.worker.messages import WorkerInfo
    from penstock.worker.process import DraftCounts, WorkerRuntime

    plan, adapters, drafts = pipeline.memory_plan, pipeline.model.lora_manager, pipeline.speculation_stats
    info = WorkerInfo(
        max_length=plan.max_length,
        max_batch_size=plan.max_batch_size,
        max_batch_input_tokens=plan.max_batch_input_tokens,
        num_blocks=pipeline.kv.num_blocks,
        block_size=plan.block_size,
        vocab_size=config.model.huggingface_config.vocabulary_size,
        adapters=adapters.names() if adapters is not None else [],
        startup=startup,
        memory=plan.rows(),
        isa=pipeline.session.kernels,
        pid=os.getpid(),
        lora_enabled=adapters is not None,
        grammars_enabled=pipeline.grammars is not None and pipeline.grammars.is_available,
    )
    return WorkerRuntime(
        scheduler,
        info,
        adapters,
        lambda: config.max_num_steps or pipeline.num_steps_for(STREAMING_LATENCY_BUDGET),
        lambda: DraftCounts(drafts.num_proposed, drafts.num_accepted, drafts.num_verified_steps),
        pipeline.pack_pending,
    )

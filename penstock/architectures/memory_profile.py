"""Plans memory from measurements: the size of the weights, and the peak memory of the largest step.

The plan is made before the KV cache is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.architectures.model import ModelOutputs, PipelineModel
from penstock.errors import InsufficientMemoryError
from penstock.kernels import DeviceMemory, SamplingInputs
from penstock.kv_cache import KVCacheManager, KVCacheSpec
from penstock.memory import MemoryPlan, plan_memory
from penstock.pipelines.core import TextContext


def plan_from_measurement(model: PipelineModel[Any], spec: KVCacheSpec, memory: DeviceMemory) -> MemoryPlan:
    """Return the memory plan of a loaded model, with measured sizes of weights and activations.

    Runs and samples one step of at most ``max_batch_input_tokens`` tokens in at most ``max_batch_size``
    sequences. The plan's maximum sequence length never exceeds ``model.memory_plan.max_length``, because the
    layers are built for ``model.memory_plan.max_length`` tokens.

    Args:
        model: the model with loaded weights.
        spec: the specification of the model's KV cache.
        memory: measures free and peak memory of the model's device.

    Raises:
        InsufficientMemoryError: the largest step does not fit into memory, or does not leave enough memory
            for the smallest permitted KV cache.
    """
    plan, config = model.memory_plan, model.pipeline_config
    weights_size = max(model.free_memory - memory.free(), 0)
    try:
        activation_size = memory.peak(lambda: run_largest_step(model, spec, plan))
        if spec.states is not None:  # the plan counts the states of the batch separately
            activation_size -= len(_largest_batch(plan)) * spec.states.num_bytes
    except MemoryError as error:
        raise InsufficientMemoryError(
            f"a step of {plan.max_batch_input_tokens} tokens does not fit into memory with weights of "
            f"{weights_size} bytes ({error}): lower --max-batch-input-tokens or --max-batch-size, or use a "
            "smaller model or encoding",
            needed=weights_size + plan.activation_size,
            available=plan.available_memory,
        ) from error
    measured_plan = plan_memory(
        replace(config, max_batch_input_tokens=plan.max_batch_input_tokens),
        spec,
        model_max_length=plan.max_length,
        weights_size=weights_size,
        activation_size=activation_size,
        free_memory=model.free_memory,
        adapters_size=plan.adapters_size,
        min_step_tokens=model.min_step_tokens(config, model.huggingface_config),
        encoder_size=plan.encoder_size,
        encoder_cache_size=plan.encoder_cache_size,
    )
    return replace(measured_plan, model_max_length=plan.model_max_length)


def run_largest_step(model: PipelineModel[Any], spec: KVCacheSpec, plan: MemoryPlan) -> None:
    """Run the largest step of a plan and sample from its logits, on a minimal KV cache."""
    contexts = _largest_batch(plan)
    num_blocks = sum(-(-context.current_length // plan.block_size) for context in contexts)
    device = model.devices[0].torch_device
    kv = KVCacheManager(
        spec,
        [num_blocks + 1] * len(spec.groups),
        plan.block_size,
        device=device,
        enable_prefix_caching=False,
        num_states=len(contexts),
    )
    for context in contexts:
        kv.claim(context)
        kv.reserve(context)
    outputs: ModelOutputs = model.execute(
        model.prepare_initial_token_inputs([contexts], kv.inputs(contexts), 1)
    )
    logits = outputs.logits if outputs.next_token_logits is None else outputs.next_token_logits
    assert logits is not None, "the model returned no logits"
    num_rows = len(logits)
    sampling = SamplingInputs(
        torch.ones(num_rows, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
        torch.full((num_rows,), 0.9, device=device),
        torch.zeros(num_rows, device=device),
        torch.full((num_rows,), 0.5, dtype=torch.float64, device=device),
    )
    # The clone has the size of the copy that penalties make of the logits.
    model.session.ops.sample(logits.float().clone(), sampling)


def _largest_batch(plan: MemoryPlan) -> list[TextContext]:
    """Return contexts that share the tokens of the largest step evenly, each of at most ``max_length``."""
    num_contexts = min(plan.max_batch_size, plan.max_batch_input_tokens)
    lengths = np.full(num_contexts, plan.max_batch_input_tokens // num_contexts)
    lengths[: plan.max_batch_input_tokens % num_contexts] += 1
    lengths = lengths.clip(max=plan.max_length)
    return [
        TextContext(prompt="", tokens=np.zeros(length, np.int64), max_length=int(length))
        for length in lengths.tolist()
    ]

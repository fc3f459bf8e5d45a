"""Driver of MAX: runs its text pipeline in this process on the CPU, without a prefix cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint, or a GGUF file in the folder of a checkpoint. Compilation by MAX takes minutes.

    Raises:
        RuntimeError: MAX does not support the encoding on CPUs.
    """
    # MAX has no setting for the number of threads. MAX uses all CPUs that the affinity of the process allows.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.num_threads])
    os.environ.setdefault("MAX_SERVE_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")
    import max.pipelines as api
    from max.driver import DeviceSpec
    from max.pipelines.context import SamplingParams
    from max.pipelines.modeling.types import RequestID, TextGenerationRequest

    if "cpu" not in (devices := api.supported_encoding_supported_devices(settings.encoding)):
        raise RuntimeError(
            f"MAX supports {settings.encoding} only on {' and '.join(devices)}, not on a CPU; "
            "use float32, q4_k, q4_0 or q6_k"
        )
    is_gguf = settings.model.suffix == ".gguf"
    folder = settings.model.parent if is_gguf else settings.model
    arguments = api.PipelineArgs(
        model_path=str(folder),
        weight_path=[settings.model] if is_gguf else [],
        quantization_encoding=settings.encoding,
        device_specs=[DeviceSpec.cpu()],
        max_length=settings.max_length,
        kv_cache=api.KVCacheConfig(enable_prefix_caching=False),
        runtime=api.PipelineRuntimeConfig(max_batch_size=settings.num_prompts),
    )
    _, pipeline = api.PIPELINE_REGISTRY.retrieve(api.PipelineConfig.from_args(arguments))

    async def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True, temperature=0, top_k=1)
        requests = [
            TextGenerationRequest(RequestID(), str(folder), prompt=prompt, sampling_params=params)
            for prompt in prompts
        ]
        answers: Tokens = [[] for _ in prompts]
        async for step in pipeline.generate_async(requests):
            on_tokens(len(step[0].tokens))
            for tokens, output in zip(answers, step, strict=True):
                tokens += output.tokens
        return answers

    return lambda prompts, num_new_tokens, on_tokens: asyncio.run(
        generate(prompts, num_new_tokens, on_tokens)
    )


if __name__ == "__main__":
    answer_requests(open_engine)

"""Runtimes of fake workers that run in a thread of the test or in a separate process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointNotFoundError, InputError
from penstock.host import heartbeat
from penstock.pipelines.core import TextContext, TokenGeneratorRequest
from penstock.scheduler import Scheduler
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.worker.client import WorkerClient
from penstock.worker.engine_client import CacheListener
from penstock.worker.messages import WorkerInfo
from penstock.worker.process import WorkerRuntime
from penstock.worker.results import Generation, RequestDelta

TOKENIZER = FakeTokenizer()


class Gate:
    """A gate at which the steps of a pipeline wait until the test allows them."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        self._is_open = False
        self.num_arrived = 0
        """Number of steps that reached the gate."""

    def allow_steps(self, count: int) -> None:
        self._semaphore.release(count)

    def open(self) -> None:
        self._is_open = True
        self._semaphore.release()

    def wait(self) -> None:
        self.num_arrived += 1
        if not self._is_open:
            assert self._semaphore.acquire(timeout=30), "the step was not allowed within the time limit"


class GatedPipeline(FakePipeline):
    """A fake pipeline. Its steps wait at a gate, and a step with a request of ``failing_requests`` fails."""

    def __init__(self, gate: Gate | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.gate = gate
        self.failing_requests: set[str] = set()

    def execute(self, batch: Any, num_steps: int = 1) -> Any:
        if self.gate is not None:
            self.gate.wait()
        if self.failing_requests & batch.keys():
            raise FloatingPointError("a secret of ours")
        return super().execute(batch, num_steps)


class FakeAdapters:
    """Fake adapters: a name and a path, without weights."""

    def __init__(self, **paths: str) -> None:
        self.paths = paths

    def load(self, name: str, path: str) -> None:
        if path == "missing":
            raise CheckpointNotFoundError(path, "does not exist")
        self.paths[name] = path

    def unload(self, name: str) -> None:
        if name not in self.paths:
            raise InputError(f"{name} is not loaded")
        del self.paths[name]

    def names(self) -> list[tuple[str, str]]:
        return list(self.paths.items())


def letters_in_order(count: int) -> Callable[[TextContext], int]:
    """Return a function that chooses the next token: ``count`` letters in alphabetical order, then EOS."""
    return lambda context: (
        FakeTokenizer.EOS if len(context.generated_tokens) == count else 97 + len(context.generated_tokens)
    )


def fake_runtime(
    pipeline: FakePipeline, adapters: Any = None, num_steps: int = 1, **options: Any
) -> WorkerRuntime:
    options = {"max_batch_size": 4, "max_batch_input_tokens": 64, "min_chunk_size": 4, **options}
    info = WorkerInfo(
        max_length=2048,
        max_batch_size=options["max_batch_size"],
        max_batch_input_tokens=options["max_batch_input_tokens"],
        num_blocks=pipeline.kv.num_blocks,
        block_size=4,
        prefix_limits=None if pipeline.kv.prefix_limits is None else list(pipeline.kv.prefix_limits),
        vocab_size=257,
        adapters=[] if adapters is None else adapters.names(),
        pid=os.getpid(),
        lora_enabled=adapters is not None,
    )
    return WorkerRuntime(
        scheduler=Scheduler(pipeline, **options),
        info=info,
        load_adapter=None if adapters is None else adapters.load,
        unload_adapter=None if adapters is None else adapters.unload,
        num_steps=lambda: num_steps,
        discard_cache=pipeline.kv.discard_storage,
    )


@asynccontextmanager
async def running_client(
    pipeline_or_factory: FakePipeline | Callable[[], WorkerRuntime],
    *,
    listener: CacheListener | None = None,
    **options: Any,
) -> AsyncIterator[WorkerClient]:
    """Run a client with a worker in a thread until the end of the block."""
    factory = (
        (lambda: fake_runtime(pipeline_or_factory))
        if isinstance(pipeline_or_factory, FakePipeline)
        else pipeline_or_factory
    )
    client = WorkerClient(factory, in_thread=True, **options)
    if listener is not None:
        client.watch_cache(listener)
    await client.start()
    try:
        yield client
    finally:
        await client.stop(0)


def make_request(name: str, prompt: str = "Hi", **fields: Any) -> TextContext:
    context = TOKENIZER.build_context(TokenGeneratorRequest(name, 0, "fake", prompt=prompt))
    for field, value in {"max_length": 60, **fields}.items():
        setattr(context, field, value)
    return context


async def read_deltas(generation: Generation) -> list[RequestDelta]:
    return [delta async for delta in generation]


def delta_token_ids(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def delta_text(deltas: list[RequestDelta]) -> str:
    return bytes(delta_token_ids(deltas)).decode()


# -- Factories for a separate process, which imports them by name ------------------------------------------


def make_hello_runtime() -> WorkerRuntime:
    return fake_runtime(FakePipeline.saying("Hello!"))


def make_endless_runtime() -> WorkerRuntime:
    return fake_runtime(FakePipeline(lambda context: 97))


def make_runtime_exiting_in_forward() -> WorkerRuntime:
    """Return a runtime whose process exits after the first token of a request."""

    def choose(context: TextContext) -> int:
        if len(context.generated_tokens):
            os._exit(3)
        return 97

    return fake_runtime(FakePipeline(choose))


def load_checkpoint_runtime(path: str) -> WorkerRuntime:
    from penstock.assembly import load_runtime
    from penstock.config import PipelineConfig

    return load_runtime(PipelineConfig.from_flat({"model_path": path}))


def raise_lookup_error(message: str) -> None:
    raise LookupError(message)


def exit_at_start() -> WorkerRuntime:
    os._exit(7)


def make_runtime_hanging_in_forward() -> WorkerRuntime:
    """Return a runtime in which the second step of the request ``hang`` never ends."""

    def choose(context: TextContext) -> int:
        if len(context.generated_tokens) and context.request_id == "hang":
            threading.Event().wait()
        return 97 if len(context.generated_tokens) < 3 else FakeTokenizer.EOS

    return fake_runtime(FakePipeline(choose))


def make_runtime_holding_gil() -> WorkerRuntime:
    """Return a runtime in which a step of the request ``hang`` sleeps for 10 minutes and holds the GIL."""
    import ctypes

    def choose(context: TextContext) -> int:
        if context.request_id == "hang":
            ctypes.PyDLL(None).sleep(600)
        return FakeTokenizer.EOS

    return fake_runtime(FakePipeline(choose))


def make_runtime_slow_in_forward() -> WorkerRuntime:
    """Return a runtime in which the step of the request ``slow`` takes 3 s and makes progress every 0.1 s."""

    def choose(context: TextContext) -> int:
        if context.request_id == "slow":
            for _ in range(30):
                time.sleep(0.1)
                heartbeat.beat()
        return FakeTokenizer.EOS

    return fake_runtime(FakePipeline(choose))


def load_slowly(started_file: Path) -> WorkerRuntime:
    """Create a file, then load for 3 s with progress every 0.1 s."""
    started_file.touch()
    for _ in range(30):
        time.sleep(0.1)
        heartbeat.beat()
    return make_hello_runtime()


def hang_at_start() -> WorkerRuntime:
    """Load without end and without progress."""
    threading.Event().wait()
    raise AssertionError


def make_runtime_exhausting_memory() -> WorkerRuntime:
    """Return a runtime in which requests named ``python``, ``torch`` and ``grammar`` exhaust the memory.

    The first step of ``python`` allocates in Python, and the first step of ``torch`` in torch. The request
    ``grammar`` allocates before its first step.
    """
    from support.kv_contexts import kv_manager  # imported here, because it imports torch

    def exhaust_memory() -> int:
        return len([bytearray(64 << 20) for _ in range(1000)])

    def ready(context: TextContext) -> bool:
        return context.request_id != "grammar" or exhaust_memory() > 0

    def choose(context: TextContext) -> int:
        if context.request_id == "python":
            return exhaust_memory()
        if context.request_id == "torch":
            import torch

            return len([torch.empty(64 << 20, dtype=torch.uint8) for _ in range(1000)])
        return 97 if len(context.generated_tokens) < 40 else FakeTokenizer.EOS

    return fake_runtime(FakePipeline(choose, kv=kv_manager(60)), max_batch_size=2, ready=ready)


def exceed_memory_at_start() -> WorkerRuntime:
    """Load with more memory than the limit of the worker."""
    buffers = [bytearray(64 << 20) for _ in range(1000)]
    return fake_runtime(FakePipeline.saying(str(len(buffers))))

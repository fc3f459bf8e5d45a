"""`WorkerClient` with a worker in a thread: requests, failures, start, stop, adapters, sleep and profiles."""

from __future__ import annotations

import asyncio
import json
import os
import pstats
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.kv_contexts import kv_manager
from support.workers import (
    FakeAdapters,
    Gate,
    GatedPipeline,
    delta_text,
    delta_token_ids,
    fake_runtime,
    letters_in_order,
    make_request,
    read_deltas,
    running_client,
)

from penstock.errors import (
    CheckpointNotFoundError,
    ConfigError,
    InputError,
    OverloadedError,
    PenstockError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.host.profiler import StepProfiler
from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.pipelines.core.cache_events import BlocksCleared
from penstock.testing import FakePipeline
from penstock.worker import supervisor
from penstock.worker.client import WorkerClient
from penstock.worker.engine_client import SleepLevel
from penstock.worker.messages import WorkerStats
from penstock.worker.process import WorkerRuntime
from penstock.worker.results import Generation

CANCELLED = TextGenerationStatus.CANCELLED
END = TextGenerationStatus.END_OF_SEQUENCE


async def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


# -- Results ---------------------------------------------------------------------------------------------


async def test_requests_get_their_output_and_end() -> None:
    async with running_client(FakePipeline.saying("Hello!")) as client:
        assert (client.state, client.is_alive) == ("ready", True)
        generations = [client.submit(make_request(str(number))) for number in range(9)]
        assert client.num_outstanding == 9
        for generation in generations:
            await generation.admitted()
            deltas = await read_deltas(generation)
            assert delta_text(deltas) == "Hello!"
            assert [delta.status.is_done for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert deltas[-1].status is END
            assert await read_deltas(generation) == []
        assert client.num_outstanding == 0
        assert client.num_late_results == 0


async def test_results_that_are_not_yet_read_are_joined_in_one_delta() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate, choose=letters_in_order(5))) as client:
        generation = client.submit(make_request("a"))
        gate.allow_steps(2)
        await wait_until(lambda: client.stats.num_steps == 2)
        assert delta_text([await anext(generation)]) == "ab"
        gate.open()
        await wait_until(lambda: generation.is_done)
        (delta,) = await read_deltas(generation)
        assert delta_text([delta]) == "cde"
        assert delta.status is END


async def test_a_step_can_generate_several_tokens() -> None:
    async with running_client(lambda: fake_runtime(FakePipeline(letters_in_order(9)), num_steps=4)) as client:
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "abcdefghi"
        assert client.stats.num_steps == 3


async def test_tokens_have_log_probabilities_on_request() -> None:
    async with running_client(FakePipeline.saying("ab")) as client:
        deltas = await read_deltas(
            client.submit(make_request("a", log_probabilities=2, log_probabilities_echo=True))
        )
        entries = [entry for delta in deltas for entry in delta.log_probabilities]
        assert [len(entry.token_log_probabilities) for entry in entries if entry] == [2, 1]
        deltas = await read_deltas(client.submit(make_request("b")))
        assert [len(delta.log_probabilities) for delta in deltas] == [0] * len(deltas)


async def test_a_prompt_without_output_has_log_probabilities() -> None:
    async with running_client(FakePipeline.saying("")) as client:
        options = {"log_probabilities": 1, "log_probabilities_echo": True}
        (delta,) = await read_deltas(client.submit(make_request("a", "Hello", **options)))
        assert delta.token_ids == []
        assert delta.prompt_log_probabilities is not None
        assert len(delta.prompt_log_probabilities.token_log_probabilities) == 4


# -- Counts ----------------------------------------------------------------------------------------------


async def test_counts_are_exact() -> None:
    def make_runtime() -> WorkerRuntime:
        return fake_runtime(FakePipeline(letters_in_order(3), kv=kv_manager(16)), max_batch_input_tokens=8)

    async with running_client(make_runtime) as client:
        assert client.stats == WorkerStats()
        # The prompt takes two steps, with 8 and 2 tokens. Then three steps decode; the last token is EOS.
        assert delta_text(await read_deltas(client.submit(make_request("a", "0123456789")))) == "abc"
        await wait_until(lambda: client.stats.num_running == 0)
        stats = client.stats
        assert stats.step_seconds > 0
        stats.step_seconds = 0
        assert stats == WorkerStats(
            num_blocks=16,
            num_cached_blocks=3,  # 13 tokens fill three blocks of 4
            num_prefix_query_tokens=10,
            num_prompt_tokens=10,
            num_generated_tokens=4,
            num_steps=5,
            last_batch_size=1,
            last_batch_tokens=1,
        )
        # The prompt fills two blocks of 4 tokens, which are cached.
        deltas = await read_deltas(client.submit(make_request("b", "0123456789")))
        assert {delta.num_cached_tokens for delta in deltas} == {8}
        deltas = await read_deltas(
            client.submit(make_request("c", "0123456789", log_probabilities_echo=True))
        )
        assert {delta.num_cached_tokens for delta in deltas} == {0}
        stats = client.stats
        assert (stats.num_prompt_tokens, stats.num_prefix_query_tokens) == (30, 20)
        assert (stats.num_prefix_hit_tokens, stats.num_generated_tokens) == (8, 12)
        assert stats.num_steps == 5 + 4 + 5


async def test_counts_include_running_requests() -> None:
    gate, is_ready = Gate(), threading.Event()

    def make_runtime() -> WorkerRuntime:
        pipeline = GatedPipeline(gate, choose=letters_in_order(20), kv=kv_manager(9))
        return fake_runtime(pipeline, max_batch_size=2, ready=lambda context: is_ready.is_set())

    async with running_client(make_runtime) as client:
        for name in "abc":
            client.submit(make_request(name, f"{name}1234", max_length=26))
        with pytest.raises(UnsupportedFeatureError):
            # The worker refuses this call after it has received all three requests.
            await client.load_adapter("a", "/a")
        is_ready.set()
        gate.allow_steps(1)
        await wait_until(lambda: client.stats.num_steps == 1)
        stats = client.stats
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (2, 1, 4)
        assert (stats.last_batch_size, stats.last_batch_tokens) == (2, 10)
        gate.allow_steps(12)  # with 17 tokens, each context needs a fifth block
        await wait_until(lambda: client.stats.num_steps == 13)
        stats = client.stats
        assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (1, 2, 1)
        assert (stats.num_used_blocks, stats.last_batch_size) == (5, 1)
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (10, 2 * 12 + 1)
        gate.open()


# -- Single requests that fail ---------------------------------------------------------------------------


async def test_the_error_for_a_request_that_exceeds_the_cache_has_the_number_of_blocks() -> None:
    async with running_client(lambda: fake_runtime(FakePipeline(kv=kv_manager(4)))) as client:
        generation = client.submit(make_request("a", "x" * 30))
        with pytest.raises(InputError, match="do not fit the 4 blocks"):
            await generation.admitted()
        for _ in range(2):
            with pytest.raises(InputError, match="do not fit the 4 blocks"):
                await anext(generation)
        assert client.num_outstanding == 0


async def test_a_request_whose_forward_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = GatedPipeline(choose=letters_in_order(5))
    pipeline.failing_requests = {"b"}
    async with running_client(pipeline) as client:
        healthy_generation, failing_generation = (
            client.submit(make_request("a")),
            client.submit(make_request("b")),
        )
        with pytest.raises(RequestFailedError) as exc_info:
            await read_deltas(failing_generation)
        assert "secret" not in str(exc_info.value)
        assert delta_text(await read_deltas(healthy_generation)) == "abcde"
        assert "a secret of ours" in caplog.text
        assert client.num_restarts == 0


async def test_an_error_in_ready_ends_only_its_request() -> None:
    def ready(context: TextContext) -> bool:
        if context.request_id == "a":
            raise InputError("the grammar does not compile")
        return True

    async with running_client(lambda: fake_runtime(FakePipeline.saying("x"), ready=ready)) as client:
        failing_generation, healthy_generation = (
            client.submit(make_request("a")),
            client.submit(make_request("b")),
        )
        with pytest.raises(InputError, match="does not compile"):
            await failing_generation.admitted()
        assert delta_text(await read_deltas(healthy_generation)) == "x"


async def test_readiness_is_checked_at_most_every_4_ms() -> None:
    num_checks, start_time = 0, time.monotonic()

    def ready(context: TextContext) -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks >= 50

    async with running_client(lambda: fake_runtime(FakePipeline.saying("x"), ready=ready)) as client:
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "x"
        assert time.monotonic() - start_time > 50 * 0.004 / 2, (
            "50 checks at intervals of 4 ms take 200 ms; half of it is required"
        )


# -- Cancelling ------------------------------------------------------------------------------------------


async def test_cancelling_a_request_frees_its_blocks() -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(GatedPipeline(gate, choose=letters_in_order(20), kv=kv_manager(20)))
    ) as client:
        running_generation = client.submit(make_request("a", "aaaaa"))
        cancelled_generation = client.submit(make_request("b", "bbbbb"))
        gate.allow_steps(2)
        await wait_until(lambda: client.stats.num_steps == 2)
        await running_generation.admitted()
        cancelled_generation.cancel()
        cancelled_generation.cancel()
        assert client.num_outstanding == 2  # the cancelled request counts until the worker reports its end
        gate.allow_steps(2)
        for _ in range(10):
            with suppress(TimeoutError):
                await wait_until(lambda: client.num_outstanding == 1, seconds=0.5)
                break
            gate.allow_steps(1)  # earlier steps ran before the worker received the cancellation
        assert client.stats.num_used_blocks == -(-(5 + client.stats.num_steps - 1) // 4)
        deltas = await read_deltas(cancelled_generation)
        assert deltas[-1].status is CANCELLED
        await cancelled_generation.admitted()
        gate.open()
        assert delta_text(await read_deltas(running_generation)) == "abcdefghijklmnopqrst"
        running_generation.cancel()
        assert running_generation.is_done
        assert client.num_outstanding == 0


async def test_a_cancellation_ends_pending_reads() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate)) as client:
        generation = client.submit(make_request("a"))
        reader = asyncio.create_task(read_deltas(generation))
        waiter = asyncio.create_task(generation.admitted())
        await asyncio.sleep(0.02)
        generation.cancel()
        assert [delta.status for delta in await reader] == [CANCELLED]
        await waiter
        gate.open()


async def test_results_after_a_cancellation_are_ignored_and_counted() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate, choose=letters_in_order(1))) as client:
        generation = client.submit(make_request("a"))
        gate.allow_steps(1)
        await wait_until(lambda: gate.num_arrived == 2)  # the last step waits at the gate
        generation.cancel()
        gate.open()
        await wait_until(lambda: client.num_outstanding == 0)
        assert client.num_late_results == 1
        assert delta_text(await read_deltas(generation)) == "a"
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "a"


async def test_a_generation_can_be_read_after_a_reader_is_cancelled() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate, choose=letters_in_order(2))) as client:
        generation = client.submit(make_request("a"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generation), 0.02)
        gate.open()
        assert delta_text(await read_deltas(generation)) == "ab"


# -- Limits ----------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded() -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(GatedPipeline(gate), max_batch_size=1), max_queue_size=2
    ) as client:
        assert client.max_outstanding == 3
        generations = [client.submit(make_request(name)) for name in "abc"]
        with pytest.raises(OverloadedError, match="3 requests") as exc_info:
            client.submit(make_request("d"))
        assert exc_info.value.retry_after >= 1
        ended_future = client.request_ended()
        assert not ended_future.done()
        gate.open()
        await asyncio.wait_for(ended_future, 10)
        assert client.num_outstanding < 3
        for generation in generations:
            await read_deltas(generation)
        await read_deltas(client.submit(make_request("d")))


async def test_a_request_id_in_use_is_refused() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate)) as client:
        generation = client.submit(make_request("a"))
        for _ in range(2):
            with pytest.raises(InputError, match="is running already"):
                client.submit(make_request("a"))
            generation.cancel()
        gate.open()


async def test_the_default_queue_size_is_the_maximum_of_64_and_four_times_the_batch_size() -> None:
    async with running_client(FakePipeline()) as client:
        assert client.max_outstanding == 4 + 64
    async with running_client(lambda: fake_runtime(FakePipeline(), max_batch_size=50)) as client:
        assert client.max_outstanding == 50 + 200


# -- Worker failures ------------------------------------------------------------------------------------


class WorkerDeath(BaseException):
    """An error that ends the worker, because it is not an `Exception`."""


class KillablePipeline(GatedPipeline):
    """A pipeline that raises `WorkerDeath` for a request named ``kill``."""

    def execute(self, batch: Any, num_steps: int = 1) -> Any:
        if "kill" in batch:
            if self.gate is not None:
                self.gate.wait()
            raise WorkerDeath
        return super().execute(batch, num_steps)


def make_killable_runtime() -> WorkerRuntime:
    return fake_runtime(KillablePipeline(choose=letters_in_order(9), kv=kv_manager(60)))


async def kill(client: WorkerClient) -> UnavailableError:
    with pytest.raises(UnavailableError) as exc_info:
        await read_deltas(client.submit(make_request("kill")))
    return exc_info.value


async def test_a_dead_worker_is_restarted_and_its_requests_end() -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(KillablePipeline(gate, choose=letters_in_order(9)))
    ) as client:
        generations = [client.submit(make_request(name)) for name in "abcdefgh"]
        gate.allow_steps(1)
        await wait_until(lambda: client.stats.num_steps == 1)
        cancelled_generation = client.submit(make_request("cancelled"))
        cancelled_generation.cancel()
        readers = [asyncio.create_task(read_deltas(generation)) for generation in generations]
        waiter = asyncio.create_task(generations[-1].admitted())
        error = asyncio.create_task(kill(client))
        gate.open()
        outcomes = await asyncio.gather(*readers, waiter, return_exceptions=True)
        assert "worker process ended unexpectedly" in str(await error)
        assert (await error).retry_after >= 1
        failed_outcomes = [outcome for outcome in outcomes if isinstance(outcome, UnavailableError)]
        finished_texts = [delta_text(outcome) for outcome in outcomes if isinstance(outcome, list)]
        assert len(failed_outcomes) + len(finished_texts) + (outcomes[-1] is None) == len(outcomes)
        assert set(finished_texts) <= {"abcdefghi"}
        assert client.num_outstanding == 0
        await wait_until(lambda: client.state == "ready")
        assert client.num_restarts == 1
        assert delta_text(await read_deltas(client.submit(make_request("b")))) == "abcdefghi"


async def test_requests_are_refused_during_a_restart() -> None:
    may_start = threading.Event()
    may_start.set()

    def make_runtime() -> WorkerRuntime:
        assert may_start.wait(20)
        return make_killable_runtime()

    async with running_client(make_runtime) as client:
        may_start.clear()
        await kill(client)
        assert (client.state, client.is_alive) == ("restarting", False)
        with pytest.raises(UnavailableError, match="being restarted"):
            client.submit(make_request("a"))
        with pytest.raises(UnavailableError, match="being restarted"):
            await client.load_adapter("a", "/a")
        may_start.set()
        await wait_until(lambda: client.state == "ready")
        assert client.is_alive
        assert client.stats.num_steps == 0


async def test_consecutive_failed_requests_restart_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    def make_runtime() -> WorkerRuntime:
        pipeline = GatedPipeline(choose=letters_in_order(2))
        pipeline.failing_requests = {"b"}
        return fake_runtime(pipeline)

    async with running_client(make_runtime) as client:
        with pytest.raises(RequestFailedError):
            await read_deltas(client.submit(make_request("b")))
        with pytest.raises(UnavailableError):
            await read_deltas(client.submit(make_request("b")))
        await wait_until(lambda: client.state == "ready")
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "ab"
        assert "a secret of ours" in caplog.text


async def test_a_hanging_worker_is_restarted() -> None:
    gates = [Gate(), Gate()]
    pipelines = iter([GatedPipeline(gates[0]), FakePipeline.saying("x")])
    async with running_client(lambda: fake_runtime(next(pipelines)), hang_limit=3.0) as client:
        start_time = time.monotonic()
        with pytest.raises(UnavailableError, match="worker process ended unexpectedly"):
            await read_deltas(client.submit(make_request("a")))
        assert time.monotonic() - start_time >= 3.0
        await wait_until(lambda: client.state == "ready")
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "x"
        assert client.is_alive
        gates[0].open()


async def test_an_idle_worker_is_not_restarted() -> None:
    async with running_client(FakePipeline.saying("x"), hang_limit=3.0) as client:
        await asyncio.sleep(3.4)
        assert (client.is_alive, client.num_restarts) == (True, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_each_request_ends_once_under_random_faults(seed: int) -> None:
    rng = random.Random(seed)
    end_reasons: Counter[str] = Counter()

    async def send_request(client: WorkerClient, name: str) -> None:
        await asyncio.sleep(rng.uniform(0, 0.3))
        context = make_request(name, "x" * rng.randint(1, 30), cache_salt=str(rng.randint(0, 3)))
        context.eos_token_ids = set()
        try:
            generation = client.submit(context)
        except UnavailableError:
            end_reasons["refused"] += 1
            return
        num_deltas_until_cancel = rng.choice([None, None, 1, 3])
        try:
            async for delta in generation:
                if delta.status.is_done:
                    end_reasons[delta.status.value] += 1
                    assert delta.status is CANCELLED or len(context.prompt_tokens) < 60
                elif num_deltas_until_cancel is not None:
                    num_deltas_until_cancel -= 1
                    if num_deltas_until_cancel == 0:
                        generation.cancel()
        except PenstockError as error:
            end_reasons[type(error).__name__] += 1
        assert generation.is_done
        assert await asyncio.wait_for(_count_deltas_after_end(generation), 60) == 0

    def make_runtime() -> WorkerRuntime:
        pipeline = KillablePipeline(choose=letters_in_order(200), kv=kv_manager(24))
        pipeline.failing_requests = {str(number) for number in range(0, 80, 9)}
        return fake_runtime(pipeline, max_batch_size=6, max_batch_input_tokens=16)

    async with running_client(make_runtime) as client:
        names = [str(number) for number in range(80)]
        names[20] = "kill"
        await asyncio.gather(*(send_request(client, name) for name in names))
        assert end_reasons.total() == 80
        await wait_until(lambda: client.num_outstanding == 0 and client.state == "ready")
        assert len(delta_token_ids(await read_deltas(client.submit(make_request("last"))))) == 58
        assert (client.stats.num_used_blocks, client.num_outstanding) == (0, 0)


async def _count_deltas_after_end(generation: Generation) -> int:
    """Return the number of deltas after the end of a generation."""
    with suppress(PenstockError):
        return len(await read_deltas(generation))
    return 0


# -- Starting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [CheckpointNotFoundError("/models/x", "does not exist"), ConfigError("max_length", "must be at least 1")],
)
async def test_a_failed_start_reports_its_cause(error: Exception) -> None:
    def make_runtime() -> WorkerRuntime:
        raise error

    client = WorkerClient(make_runtime, in_thread=True)
    client.launch()
    folder = Path(client._supervisor._folder)
    assert client.state == "starting"
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(type(error)) as exc_info:
        await client.start()
    assert str(exc_info.value) == str(error)
    assert client.state == "stopped"
    assert not folder.exists()
    await client.stop(1)


async def test_stop_ends_a_start_in_progress() -> None:
    may_start = threading.Event()

    def make_runtime() -> WorkerRuntime:
        assert may_start.wait(20)
        return make_killable_runtime()

    client = WorkerClient(make_runtime, in_thread=True)
    start_task = asyncio.create_task(client.start())
    await asyncio.sleep(0.02)
    await client.stop(1)
    with pytest.raises(UnavailableError, match="stopped while it started"):
        await start_task
    assert client.state == "stopped"
    may_start.set()


async def test_failed_launches_stop_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAY", 0.001)
    async with running_client(make_killable_runtime) as client:

        def fail(*_: Any, **__: Any) -> Any:
            raise OSError("too many processes")

        monkeypatch.setattr(supervisor, "WorkerConnection", fail)
        await kill(client)
        await wait_until(lambda: client.state == "stopped")
        assert "too many processes" in str(client.failure)
        assert client.stats == WorkerStats()


async def test_an_unexpected_error_during_the_start_is_reported() -> None:
    with pytest.raises(UnavailableError, match="could not start: ZeroDivisionError: division by zero"):
        await WorkerClient(lambda: 1 / 0, in_thread=True).start()  # type: ignore[arg-type, return-value]


async def test_a_worker_is_not_restarted_after_five_failed_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAY", 0.001)
    num_starts = 0

    def make_runtime() -> WorkerRuntime:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 1:
            raise CheckpointNotFoundError("/models/x", "was deleted")
        return make_killable_runtime()

    async with running_client(make_runtime) as client:
        await kill(client)
        await wait_until(lambda: client.state == "stopped")
        assert num_starts == 1 + 5
        with pytest.raises(UnavailableError, match="could not be restarted: /models/x: was deleted"):
            client.submit(make_request("a"))
        assert isinstance(client.failure, CheckpointNotFoundError)
        assert "is not restarted after 5 failed starts" in caplog.text


async def test_a_worker_that_dies_before_its_first_answer_counts_as_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_DELAY", 0.001)
    num_starts = 0

    def make_runtime() -> WorkerRuntime:
        nonlocal num_starts
        num_starts += 1
        runtime = make_killable_runtime()
        if num_starts > 1:

            def die(stats: WorkerStats) -> None:
                raise WorkerDeath

            object.__setattr__(runtime, "add_counts", die)
        return runtime

    async with running_client(make_runtime) as client:
        await kill(client)
        await wait_until(lambda: client.state == "stopped")
        assert num_starts == 1 + 5


# -- Adapters --------------------------------------------------------------------------------------------


async def test_adapters_after_a_restart_equal_the_adapters_before_it() -> None:
    started_adapters: list[FakeAdapters] = []

    def make_runtime() -> WorkerRuntime:
        started_adapters.append(FakeAdapters(first="/1", second="/2"))
        return fake_runtime(KillablePipeline(choose=letters_in_order(2)), started_adapters[-1])

    async with running_client(make_runtime) as client:
        assert client.adapters == {"first": "/1", "second": "/2"}
        await client.load_adapter("third", "/3")
        await client.unload_adapter("second")
        with pytest.raises(CheckpointNotFoundError, match="missing: does not exist"):
            await client.load_adapter("fourth", "missing")
        with pytest.raises(InputError, match="fifth is not loaded"):
            await client.unload_adapter("fifth")
        expected = {"first": "/1", "third": "/3"}
        assert client.adapters == started_adapters[0].paths == expected
        await kill(client)
        await wait_until(lambda: client.state == "ready")
        assert client.adapters == started_adapters[1].paths == expected


async def test_an_adapter_that_cannot_be_restored_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    class FailingAdapters(FakeAdapters):
        def load(self, name: str, path: str) -> None:
            if len(started_adapters) > 1:
                raise InputError("its file was deleted")
            super().load(name, path)

    started_adapters: list[FailingAdapters] = []

    def make_runtime() -> WorkerRuntime:
        started_adapters.append(FailingAdapters())
        return fake_runtime(KillablePipeline(choose=letters_in_order(2)), started_adapters[-1])

    async with running_client(make_runtime) as client:
        await client.load_adapter("a", "/a")
        await kill(client)
        await wait_until(lambda: client.state == "ready")
        assert client.adapters == {}
        assert "its file was deleted" in caplog.text


async def test_an_adapter_call_fails_if_the_worker_dies() -> None:
    gate = Gate()

    def make_runtime() -> WorkerRuntime:
        return fake_runtime(KillablePipeline(gate, choose=letters_in_order(2)), FakeAdapters())

    async with running_client(make_runtime) as client:
        error = asyncio.create_task(kill(client))
        await wait_until(lambda: gate.num_arrived == 1)
        call = asyncio.create_task(client.load_adapter("a", "/a"))
        await asyncio.sleep(0.02)
        gate.open()
        with pytest.raises(UnavailableError):
            await call
        await error


async def test_loading_an_adapter_without_lora_is_refused() -> None:
    async with running_client(FakePipeline()) as client:
        assert client.adapters == {}
        with pytest.raises(UnsupportedFeatureError, match="LoRA adapters"):
            await client.load_adapter("a", "/a")


# -- Stopping --------------------------------------------------------------------------------------------


async def test_stopping_waits_for_running_requests() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate, choose=letters_in_order(5))) as client:
        generation = client.submit(make_request("a"))
        stop_task = asyncio.create_task(client.stop(20))
        await wait_until(lambda: client.state == "stopping")
        with pytest.raises(UnavailableError, match="shutting down"):
            client.submit(make_request("b"))
        assert client.is_alive
        gate.open()
        await stop_task
        assert delta_text(await read_deltas(generation)) == "abcde"
        assert (client.state, client.is_alive) == ("stopped", False)
        with pytest.raises(UnavailableError, match="shutting down"):
            client.submit(make_request("b"))


async def test_stopping_waits_at_most_the_grace_period() -> None:
    gate = Gate()
    async with running_client(GatedPipeline(gate, choose=letters_in_order(5))) as client:
        generation = client.submit(make_request("a"))
        gate.allow_steps(1)
        assert delta_token_ids([await anext(generation)]) == [97]
        stop_task = asyncio.create_task(client.stop(0.05))
        with pytest.raises(UnavailableError, match="shutting down"):
            await read_deltas(generation)
        generation.cancel()
        gate.open()
        await stop_task
        assert client.num_outstanding == 0


async def test_folders_descriptors_and_threads_are_released() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        async with running_client(make_killable_runtime) as client:
            await kill(client)
            await wait_until(lambda client=client: client.state == "ready")
            folder = Path(client._supervisor._folder)
            # The folder has at most two sockets for each of two workers, and one progress file.
            assert len(list(folder.iterdir())) <= 5
        assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


async def test_a_temporary_folder_with_a_long_path_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long_folder = tmp_path / ("x" * 90)
    long_folder.mkdir()
    monkeypatch.setattr(supervisor.tempfile, "tempdir", str(long_folder))
    async with running_client(FakePipeline.saying("x")) as client:
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "x"


# -- Sleep -----------------------------------------------------------------------------------------------


async def test_sleep_drops_cached_prefixes_and_refuses_requests() -> None:
    async with running_client(
        lambda: fake_runtime(FakePipeline(letters_in_order(3), kv=kv_manager(16)))
    ) as client:
        await read_deltas(client.submit(make_request("a", "0123456789")))
        await client.sleep(1, 1)
        await client.sleep(2, 1)  # already asleep: no effect
        assert (client.state, client.is_alive) == ("asleep", True)
        with pytest.raises(UnavailableError, match="the model is asleep: send POST /wake_up"):
            client.submit(make_request("b"))
        with pytest.raises(UnavailableError, match="asleep"):
            await client.reset_prefix_cache()
        await client.wake_up()
        await client.wake_up()
        deltas = await read_deltas(client.submit(make_request("b", "0123456789")))
        assert (delta_text(deltas), {delta.num_cached_tokens for delta in deltas}) == ("abc", {0})
        assert client.num_restarts == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_running_requests_finish_before_sleep(level: SleepLevel) -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(GatedPipeline(gate, choose=letters_in_order(5), kv=kv_manager(16)))
    ) as client:
        generation = client.submit(make_request("a"))
        sleep_task = asyncio.create_task(client.sleep(level, 60))
        await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match="asleep"):
            client.submit(make_request("b"))
        gate.open()
        await sleep_task
        assert delta_text(await read_deltas(generation)) == "abcde"
        assert client.state == "asleep"


async def test_sleep_fails_requests_that_exceed_the_grace_period() -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(GatedPipeline(gate, choose=letters_in_order(50), kv=kv_manager(20)))
    ) as client:
        generation = client.submit(make_request("a"))
        gate.allow_steps(1)
        await generation.admitted()
        asyncio.get_running_loop().call_later(0.2, gate.open)
        await client.sleep(1, 0.1)
        with pytest.raises(UnavailableError, match="put to sleep"):
            await read_deltas(generation)
        await client.wake_up()
        assert delta_text(await read_deltas(client.submit(make_request("b", max_length=5)))) == "abc"


async def test_sleep_level_two_stops_the_worker_and_wake_up_starts_it() -> None:
    events: list[object] = []
    started_adapters: list[FakeAdapters] = []

    def make_runtime() -> WorkerRuntime:
        started_adapters.append(FakeAdapters())
        return fake_runtime(FakePipeline(letters_in_order(3), kv=kv_manager(16)), started_adapters[-1])

    async with running_client(make_runtime, listener=lambda worker, batch: events.extend(batch)) as client:
        await client.load_adapter("tone", "/tone")
        await read_deltas(client.submit(make_request("a", "0123456789")))
        await client.sleep(2, 1)
        assert (client.state, client.is_alive, client.stats) == ("asleep", True, WorkerStats())
        assert events[-1] == BlocksCleared()
        await client.wake_up()
        assert client.state == "ready"
        assert [adapters.paths for adapters in started_adapters] == [{"tone": "/tone"}] * 2
        deltas = await read_deltas(client.submit(make_request("b", "0123456789")))
        assert (delta_text(deltas), {delta.num_cached_tokens for delta in deltas}) == ("abc", {0})
        await client.reload(1)
        assert delta_text(await read_deltas(client.submit(make_request("c")))) == "abc"
        assert (len(started_adapters), client.num_restarts) == (3, 0)


async def test_a_worker_that_cannot_release_its_cache_stays_awake() -> None:
    def make_runtime() -> WorkerRuntime:
        def refuse() -> None:
            raise UnsupportedFeatureError("releasing only the KV cache", "use level 2")

        return replace(fake_runtime(FakePipeline(letters_in_order(3))), discard_cache=refuse)

    async with running_client(make_runtime) as client:
        with pytest.raises(UnsupportedFeatureError, match="level 2"):
            await client.sleep(1, 1)
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "abc"


async def test_a_model_that_cannot_be_loaded_again_stays_asleep() -> None:
    is_broken = False

    def make_runtime() -> WorkerRuntime:
        if is_broken:
            raise CheckpointNotFoundError("/model", "does not exist")
        return fake_runtime(FakePipeline(letters_in_order(3)))

    async with running_client(make_runtime) as client:
        await client.sleep(2, 1)
        is_broken = True
        for _ in range(2):
            with pytest.raises(CheckpointNotFoundError):
                await client.wake_up()
            assert client.state == "asleep"
        is_broken = False
        await client.wake_up()
        assert delta_text(await read_deltas(client.submit(make_request("a")))) == "abc"


async def test_profiles_are_written(tmp_path: Path) -> None:
    def make_runtime() -> WorkerRuntime:
        profiler = StepProfiler(str(tmp_path / "profiles"), "worker-7")
        return replace(fake_runtime(FakePipeline(letters_in_order(3))), profiler=profiler)

    async with running_client(make_runtime) as client:
        with pytest.raises(InputError, match="start one first"):
            await client.stop_profile()
        await client.start_profile()
        with pytest.raises(InputError, match="already"):
            await client.start_profile()
        await read_deltas(client.submit(make_request("a")))
        await client.stop_profile()
    profile_file, trace_file = sorted((tmp_path / "profiles").iterdir())
    assert profile_file.name.startswith("worker-7-")
    assert any(name == "step" for _, _, name in pstats.Stats(str(profile_file)).stats)  # type: ignore[attr-defined]
    events = json.loads(trace_file.read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "scheduler step"]
    assert len(steps) >= 4


async def test_profiles_are_refused_without_a_folder() -> None:
    async with running_client(FakePipeline()) as client:
        with pytest.raises(UnsupportedFeatureError, match="--profile-dir"):
            await client.start_profile()

"""`RayEngine` with replicas in this process, which the tests can make unreachable. Needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from unittest.mock import patch

import httpx
import pytest
from support.kv_contexts import kv_manager
from support.workers import (
    Gate,
    GatedPipeline,
    delta_text,
    fake_runtime,
    letters_in_order,
    make_request,
    read_deltas,
)

from penstock.config import PipelineConfig
from penstock.errors import (
    InputError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import Grammar
from penstock.ray.engine import RayEngine, ReplicaLostError
from penstock.ray.ingress import Application
from penstock.ray.replica import EngineReplica
from penstock.serve.config import ServeConfig
from penstock.serve.service_factory import build_services
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.worker.client import WorkerClient

CONFIG = PipelineConfig.from_flat({"model_path": "demo"})


class LocalReplicas:
    """Replicas in this process. Requests go to the replicas one after the other, or to the preferred replica.

    Args:
        *pipelines: functions that make the pipeline of each replica.
        honours_preference: whether a request goes to its preferred replica.
    """

    def __init__(self, *pipelines: Callable[[], FakePipeline], honours_preference: bool = False) -> None:
        self.honours_preference = honours_preference
        self.clients = [
            WorkerClient(lambda make=make: fake_runtime(make()), in_thread=True)  # type: ignore[misc]
            for make in pipelines
        ]
        self.replicas = [
            EngineReplica(CONFIG, ServeConfig(), 64, 1, client, f"replica {number}")
            for number, client in enumerate(self.clients)
        ]
        self.lost_replicas: set[int] = set()
        self.messages_before_loss: dict[int, int] = {}
        """Replica number -> number of messages of its next request after which the replica is lost."""
        self.used_replicas: list[int] = []
        """Replica number of each attempt of a request, in order."""
        self.preferred_replicas: list[str] = []
        self.num_resets = 0
        self._turns = cycle(range(len(self.replicas)))

    async def generate(self, frames: Sequence[bytes], preferred_replica: str) -> AsyncIterator[bytes]:
        uses_preferred = self.honours_preference and preferred_replica
        number = int(preferred_replica.removeprefix("replica ")) if uses_preferred else next(self._turns)
        self.used_replicas.append(number)
        self.preferred_replicas.append(preferred_replica)
        if number in self.lost_replicas:
            raise ReplicaLostError(f"replica {number} is lost")
        num_messages_left = self.messages_before_loss.get(number)
        stream = self.replicas[number].generate(frames)
        try:
            async for data in stream:
                if num_messages_left == 0:
                    self.lost_replicas.add(number)
                    raise ReplicaLostError(f"replica {number} was killed")
                yield data
                num_messages_left = None if num_messages_left is None else num_messages_left - 1
        finally:
            await stream.aclose()

    async def reports(self, positions: Mapping[str, int]) -> list[bytes]:
        return [
            await replica.report(positions)
            for number, replica in enumerate(self.replicas)
            if number not in self.lost_replicas
        ]

    async def reset_prefix_caches(self) -> None:
        self.num_resets += 1


@asynccontextmanager
async def open_engine(
    *pipelines: Callable[[], FakePipeline], max_outstanding: int = 8, honours_preference: bool = False
) -> AsyncIterator[tuple[RayEngine, LocalReplicas]]:
    replicas = LocalReplicas(*pipelines, honours_preference=honours_preference)
    engine = RayEngine(replicas, max_outstanding)
    for client in replicas.clients:
        await client.start()
    await engine.start()
    try:
        yield engine, replicas
    finally:
        await engine.stop(0)
        for client in replicas.clients:
            await client.stop(0)


def make_pipeline() -> FakePipeline:
    return FakePipeline(letters_in_order(12))


async def test_a_request_gets_the_output_of_its_replica() -> None:
    async with open_engine(make_pipeline) as (engine, replicas):
        assert delta_text(await read_deltas(engine.submit(make_request("a")))) == "abcdefghijkl"
        assert replicas.preferred_replicas == ["replica 0"]
        assert engine.num_outstanding == 0
        assert engine.info.max_batch_size == 4


async def test_the_first_result_ends_the_load_of_a_prompt() -> None:
    """After the first result of its long prompt, replica 0 has less load than replica 1."""
    gates = Gate(), Gate()
    pipelines = [partial(GatedPipeline, gate, choose=letters_in_order(12)) for gate in gates]
    async with open_engine(*pipelines, honours_preference=True) as (engine, replicas):
        long_request = engine.submit(make_request("a", "x" * 600, max_length=700))
        generations = [long_request, *(engine.submit(make_request(name)) for name in "bc")]
        await asyncio.sleep(0)
        gates[0].allow_steps(10)  # each step computes 64 tokens of the prompt
        await asyncio.wait_for(anext(long_request), 30)
        generations.append(engine.submit(make_request("d")))
        await asyncio.sleep(0)
        assert replicas.used_replicas == [0, 1, 1, 0]
        for gate in gates:
            gate.open()
        for generation in generations:
            await read_deltas(generation)


@pytest.mark.parametrize("num_messages", [0, 1, 3])
async def test_another_replica_continues_a_request_after_a_loss(num_messages: int) -> None:
    """Each token is delivered once. The second replica gets the prompt and the first replica's tokens."""
    prompts: list[list[int]] = []

    def make_recording_pipeline() -> FakePipeline:
        choose_letter = letters_in_order(12)
        return FakePipeline(
            lambda context: (prompts.append(context.all_tokens.tolist()), choose_letter(context))[1]
        )

    gate = Gate()
    async with open_engine(
        lambda: GatedPipeline(gate, choose=letters_in_order(12)), make_recording_pipeline
    ) as (
        engine,
        replicas,
    ):
        replicas.messages_before_loss[0] = num_messages
        generation = engine.submit(make_request("a"))
        for _ in range(num_messages + 1):  # each message has one token
            gate.allow_steps(1)
            await asyncio.sleep(0.05)
        gate.open()
        deltas = await read_deltas(generation)
        assert delta_text(deltas) == "abcdefghijkl"
        assert replicas.used_replicas == [0, 1]
        assert engine.num_resumed == 1
        tokens_of_first_replica = prompts[0][-num_messages:] if num_messages else []
        assert tokens_of_first_replica == [97 + n for n in range(num_messages)]


async def test_a_request_with_a_grammar_fails_if_its_replica_is_lost_after_its_first_output() -> None:
    gate = Gate()
    grammar = Grammar("regex", "[a-l]*")
    async with open_engine(lambda: GatedPipeline(gate, choose=letters_in_order(12)), make_pipeline) as (
        engine,
        replicas,
    ):
        replicas.messages_before_loss[0] = 1
        generation = engine.submit(make_request("a", grammar=grammar))
        for _ in range(2):
            gate.allow_steps(1)
            await asyncio.sleep(0.05)
        gate.open()
        with pytest.raises(UnavailableError, match="of the request was lost: replica 0 was killed"):
            await read_deltas(generation)
        assert replicas.used_replicas == [0]
        # A request without output is sent again: b goes to replica 1, c to replica 0 (lost) and then to 1.
        for name in ("b", "c"):
            assert (
                delta_text(await read_deltas(engine.submit(make_request(name, grammar=grammar))))
                == "abcdefghijkl"
            )
        assert replicas.used_replicas == [0, 1, 0, 1]


async def test_prompts_with_a_common_prefix_share_a_replica() -> None:
    """The engine reads the cached blocks of a replica from the replica's reports.

    Until the next report, the blocks of requests that were sent to the replica also count as cached.
    """

    def make_caching_pipeline() -> FakePipeline:
        return FakePipeline(letters_in_order(12), kv=kv_manager(300))

    async with open_engine(make_caching_pipeline, make_caching_pipeline, honours_preference=True) as (
        engine,
        replicas,
    ):
        other_request = engine.submit(make_request("other", "z" * 40))
        for name in "abc":
            await read_deltas(engine.submit(make_request(name, "x" * 400 + name, max_length=500)))
        assert replicas.preferred_replicas == ["replica 0"] + ["replica 1"] * 3
        await read_deltas(other_request)
        for _ in range(3):
            await engine._poll()
        assert not engine._choice._prefixes._expected_workers
        assert engine._choice._prefixes.num_blocks > 100
        await read_deltas(engine.submit(make_request("d", "x" * 400 + "d", max_length=500)))
        await read_deltas(engine.submit(make_request("e", "z" * 39)))
        assert replicas.preferred_replicas[-2:] == ["replica 1", "replica 0"]
        replicas.lost_replicas.add(1)
        num_before = len(replicas.preferred_replicas)
        await read_deltas(engine.submit(make_request("f", "x" * 400 + "f", max_length=500)))
        assert replicas.preferred_replicas[num_before:] == ["replica 1", "replica 0"]
        await engine._poll()
        await read_deltas(engine.submit(make_request("g", "x" * 400 + "g", max_length=500)))
        assert replicas.preferred_replicas[-1] == "replica 0"
        assert engine._choice._loads.costs == [0, 0]


async def test_an_error_of_a_replica_is_raised_by_its_request() -> None:
    def make_failing_pipeline() -> FakePipeline:
        pipeline = GatedPipeline(choose=letters_in_order(3))
        pipeline.failing_requests.add("a")
        return pipeline

    async with open_engine(make_failing_pipeline) as (engine, replicas):
        with pytest.raises(RequestFailedError):
            await read_deltas(engine.submit(make_request("a")))
        assert replicas.used_replicas == [0]
        assert delta_text(await read_deltas(engine.submit(make_request("b")))) == "abc"


async def test_requests_beyond_the_limit_and_after_the_stop_are_refused() -> None:
    gate = Gate()
    async with open_engine(lambda: GatedPipeline(gate, choose=letters_in_order(3)), max_outstanding=1) as (
        engine,
        _,
    ):
        running_request = engine.submit(make_request("a"))
        with pytest.raises(InputError, match="a is running already"):
            engine.submit(make_request("a"))
        with pytest.raises(OverloadedError, match="1 requests are running or waiting"):
            engine.submit(make_request("b"))
        ended_future = engine.request_ended()
        gate.open()
        assert delta_text(await read_deltas(running_request)) == "abc"
        await ended_future
        cancelled_request = engine.submit(make_request("c"))
        ended_future = engine.request_ended()
        cancelled_request.cancel()
        await ended_future
        assert engine.num_outstanding == 0
    with pytest.raises(UnavailableError, match="stopped"):
        engine.submit(make_request("d"))


async def test_all_controls_except_the_prefix_cache_reset_are_refused() -> None:
    async with open_engine(make_pipeline) as (engine, replicas):
        await engine.reset_prefix_cache()
        assert replicas.num_resets == 1
        for control in (
            engine.sleep(1, 0),
            engine.wake_up(),
            engine.reload(0),
            engine.load_adapter("a", "b"),
        ):
            with pytest.raises(UnsupportedFeatureError, match="deploy the application again"):
                await control
        for control in (engine.start_profile(), engine.stop_profile(), engine.unload_adapter("a")):
            with pytest.raises(UnsupportedFeatureError, match="on Ray is not supported"):
                await control
        with pytest.raises(UnsupportedFeatureError, match="cache events"):
            engine.watch_cache(lambda worker, events: None)


async def test_totals_include_lost_replicas() -> None:
    async with open_engine(make_pipeline, make_pipeline) as (engine, replicas):
        for name in ("a", "b"):
            await read_deltas(engine.submit(make_request(name)))
        await engine._poll()
        assert engine.stats.num_generated_tokens == 2 * 13
        replicas.lost_replicas.add(0)
        await engine._poll()
        await engine._poll()
        assert engine.stats.num_generated_tokens == 2 * 13
        assert engine.is_alive
        replicas.lost_replicas.remove(0)  # the replica was only slow to report
        await engine._poll()
        assert engine.stats.num_generated_tokens == 2 * 13
        with patch("penstock.ray.engine._MAX_MISSING_REPORTS", 0):
            replicas.lost_replicas.add(0)
            await engine._poll()
        assert not engine._missing_reports
        assert engine.stats.num_generated_tokens == 2 * 13
        replicas.lost_replicas.add(1)
        await engine._poll()
        assert not engine.is_alive


async def test_the_application_starts_and_drains_with_the_asgi_lifespan() -> None:
    gate = Gate()
    replicas = LocalReplicas(lambda: GatedPipeline(gate, choose=letters_in_order(5)))
    engine = RayEngine(replicas, 8)
    services = build_services(ServeConfig(access_log=False), CONFIG, engine, FakeTokenizer())
    application = Application(services, engine)
    incoming_messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent_messages: list[dict[str, str]] = []

    async def send(message: dict[str, str]) -> None:
        sent_messages.append(message)

    lifespan = asyncio.create_task(application({"type": "lifespan"}, incoming_messages.get, send))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 9}
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        await replicas.clients[0].start()
        await incoming_messages.put({"type": "lifespan.startup"})
        while not sent_messages:
            await asyncio.sleep(0.01)
        assert sent_messages == [{"type": "lifespan.startup.complete"}]
        assert (await client.get("/ready")).status_code == 200
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        while not gate.num_arrived:
            await asyncio.sleep(0.01)
        await incoming_messages.put({"type": "lifespan.shutdown"})
        await asyncio.sleep(0.05)
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        assert len(sent_messages) == 1
        gate.open()
        assert (await answer).json()["choices"][0]["text"] == "abcde"
        await lifespan
    assert sent_messages[1:] == [{"type": "lifespan.shutdown.complete"}]
    await replicas.clients[0].stop(0)

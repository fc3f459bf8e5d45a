"""Client ids by API key or connection, fairness between clients, and the limit of choices per request."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import Exchange, wait_until
from support.in_process_server import run_in_process, user_message
from support.workers import (
    Gate,
    GatedPipeline,
    delta_text,
    fake_runtime,
    letters_in_order,
    make_request,
    read_deltas,
    running_client,
)

from penstock.errors import OverloadedError
from penstock.pipelines.core import TextContext
from penstock.serve.http.auth import ApiKeys
from penstock.testing import FakePipeline


def make_body(n: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [user_message("Hi")],
        "n": n,
        "stream": True,
        "max_tokens": 1000,
        **fields,
    }


def test_each_of_several_api_keys_is_a_client() -> None:
    def client_number(keys: tuple[str, ...], key: bytes) -> int | None:
        return ApiKeys(keys).check([(b"authorization", b"Bearer " + key)])

    assert [client_number(("one", "two"), key) for key in (b"one", b"two")] == [0, 1]
    assert client_number(("one",), b"one") is None
    assert ApiKeys(()).check([]) is None


@pytest.mark.parametrize("keys", [("one",), ("one", "two")])
async def test_a_context_has_the_client_id_of_its_request(keys: tuple[str, ...]) -> None:
    client_ids: set[str] = set()

    def choose(context: TextContext) -> int:
        client_ids.add(context.client_id)
        return ord("a")

    async with run_in_process(FakePipeline(choose), api_key=keys) as server:
        app = server.app
        for key, port in ((keys[0], 1), (keys[-1], 2)):
            exchange = Exchange(
                app,
                "/v1/chat/completions",
                make_body(2, max_tokens=2),
                headers={"authorization": f"Bearer {key}"},
                client=("10.0.0.1", port),
            )
            await exchange.wait_until_ended()
            assert exchange.status == 200
    assert client_ids == ({"10.0.0.1:1", "10.0.0.1:2"} if len(keys) == 1 else {"key 0", "key 1"})


async def test_many_choices_do_not_delay_another_client() -> None:
    gate = Gate()
    async with run_in_process(
        GatedPipeline(gate, choose=lambda context: ord("a")), max_batch_size=4
    ) as server:
        app = server.app
        large_exchange = Exchange(app, "/v1/chat/completions", make_body(60), client=("10.0.0.1", 1))
        await wait_until(lambda: server.services.worker.num_outstanding == 60)
        gate.allow_steps(20)
        await wait_until(lambda: server.services.worker.stats.num_steps == 20)
        small_exchange = Exchange(app, "/v1/chat/completions", make_body(), client=("10.0.0.1", 2))
        await wait_until(lambda: server.services.worker.num_outstanding == 61)
        gate.allow_steps(3)  # the running step, the step that admits the request, and one more step
        await small_exchange.wait_until_sent(1)
        large_exchange.disconnect()
        small_exchange.disconnect()
        gate.open()
        await large_exchange.wait_until_ended()
        await small_exchange.wait_until_ended()


async def test_more_choices_than_the_limit_are_refused() -> None:
    async with run_in_process(max_choices_per_request=4) as server:
        refused_response = await server.post("/v1/chat/completions", messages=[user_message("Hi")], n=5)
        assert refused_response.status_code == 400
        error = refused_response.json()["error"]
        assert (error["param"], error["type"]) == ("n", "invalid_request_error")
        assert "5 choices, but a request may have 4 (--max-choices-per-request)" in error["message"]
        refused_response = await server.post("/v1/completions", prompt=["a", "b", "c"], n=2)
        assert refused_response.status_code == 400
        assert "3 prompts with 2 choices each, but" in refused_response.json()["error"]["message"]
        refused_response = await server.post("/v1/completions", prompt=["a"] * 5)
        assert refused_response.json()["error"]["param"] == "prompt"
        assert len((await server.chat(n=4))["choices"]) == 4
        assert len((await server.complete(prompt=["a", "b"], n=2))["choices"]) == 4


async def test_a_queue_full_of_requests_of_one_client_accepts_another_client() -> None:
    gate = Gate()
    async with running_client(
        lambda: fake_runtime(GatedPipeline(gate, choose=letters_in_order(2)), max_batch_size=2),
        max_queue_size=3,
    ) as client:
        client_a_generations = [
            client.submit(make_request(f"a{number}", client_id="a")) for number in range(5)
        ]
        with pytest.raises(OverloadedError):
            client.submit(make_request("a5", client_id="a"))
        client_b_generations = [
            client.submit(make_request(f"b{number}", client_id="b")) for number in range(2)
        ]
        for client_id in "ac":
            with pytest.raises(OverloadedError):
                client.submit(make_request("x", client_id=client_id))
        gate.open()
        for generation in (*client_a_generations, *client_b_generations):
            assert delta_text(await read_deltas(generation)) == "ab"
        assert not client._client_ids

"""Start, signals and shutdown of a server, its addresses, and connections with invalid or slow requests."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.config import PipelineConfig
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.pipelines.core import TextContext
from penstock.scheduler import Scheduler
from penstock.serve.config import ServeConfig
from penstock.serve.http import lifecycle
from penstock.serve.http.lifecycle import Server, listening_socket, url_of
from penstock.serve.http.origins import is_loopback
from penstock.serve.http.startup import Startup, process_age
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.worker.client import WorkerClient
from penstock.worker.messages import WorkerInfo
from penstock.worker.process import WorkerRuntime

TOKEN_SECONDS = 0.004
INFO = WorkerInfo(
    max_length=4096,
    max_batch_size=8,
    max_batch_input_tokens=8192,
    num_blocks=1000,
    block_size=32,
    vocab_size=257,
    startup=[("weights", 0.25)],
    isa="fake",
)


def choose_slowly(context: TextContext) -> int:
    time.sleep(TOKEN_SECONDS)
    return ord("a")


def make_runtime() -> WorkerRuntime:
    return WorkerRuntime(scheduler=Scheduler(FakePipeline(choose_slowly), max_batch_size=8), info=INFO)


class ServerRun:
    """A server in the main thread, which receives signals, and a client in another thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._listening: queue.Queue[str] = queue.Queue()
        self.ready = threading.Event()
        report_ready = lifecycle.report_ready

        def listen(host: str, port: int) -> socket.socket:
            listener = listening_socket(host, port)
            self._listening.put(url_of(listener))
            return listener

        def report_and_set_ready(*args: Any) -> None:
            report_ready(*args)
            self.ready.set()

        monkeypatch.setattr(lifecycle, "listening_socket", listen)
        monkeypatch.setattr(lifecycle, "report_ready", report_and_set_ready)

    def serve(
        self,
        use_server: Callable[[httpx.Client], Any],
        load_runtime: Callable[[], WorkerRuntime] = make_runtime,
        load_tokenizer: Callable[[], FakeTokenizer] = FakeTokenizer,
        *,
        waits_until_ready: bool = True,
        **config: Any,
    ) -> tuple[int, Any]:
        """Run the server and the client. Return the exit status and the result of `use_server`."""
        result: list[Any] = []

        def run_client() -> None:
            url = self._listening.get(timeout=60)
            if waits_until_ready:
                assert self.ready.wait(60)
            with httpx.Client(base_url=url, timeout=60) as http:
                result.append(use_server(http))

        thread = threading.Thread(target=run_client)
        thread.start()
        worker = WorkerClient(load_runtime, in_thread=True)
        server = Server(ServeConfig(port=0, **config), PipelineConfig(), worker, load_tokenizer, Startup())
        status = server.run()
        thread.join(60)
        return status, result[0]


@pytest.fixture
def server_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerRun]:
    yield ServerRun(monkeypatch)
    gc.unfreeze()


def connect(http: httpx.Client) -> socket.socket:
    return socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60)


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def make_body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def read_stream(
    http: httpx.Client, max_tokens: int, after_first_event: Callable[[], Any]
) -> tuple[list[Any], Any]:
    """Return the events of a stream and the result of `after_first_event`, called after the first event."""
    events: list[Any] = []
    action_result: Any = None
    with http.stream("POST", "/v1/completions", json=make_body(max_tokens, stream=True)) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 1:
                    action_result = after_first_event()
    return events, action_result


def test_the_server_runs_until_a_stop_signal(
    server_run: ServerRun, capfd: pytest.CaptureFixture[str]
) -> None:
    def use_server(http: httpx.Client) -> Any:
        answer = http.post("/v1/completions", json=make_body(3))
        probes = [http.get(path).status_code for path in ("/health", "/ready")]
        metrics = http.get("/metrics").text
        send_signal(signal.SIGTERM)
        return answer, probes, metrics, str(http.base_url)

    status, (answer, probes, metrics, url) = server_run.serve(use_server)
    assert status == 0
    assert answer.json()["choices"][0]["text"] == "aaa"
    assert probes == [200, 200]
    assert 'penstock_build_info{isa="fake",model="demo"' in metrics
    assert 'penstock_startup_seconds{phase="weights"} 0.25' in metrics
    output, err = capfd.readouterr()
    assert output == ""
    assert "penstock: worker weights: 0.25 s\n" in err
    assert f"penstock: serving demo at {url.rstrip('/')} (ready after " in err
    assert "outcome=length model=demo" in err
    assert "event=stopped clean=true" in err


def test_json_logs_contain_only_json(server_run: ServerRun, capfd: pytest.CaptureFixture[str]) -> None:
    def use_server(http: httpx.Client) -> str:
        send_signal(signal.SIGINT)
        return str(http.base_url)

    status, url = server_run.serve(use_server, log_format="json")
    assert status == 0
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    ready_event = next(event for event in events if event["event"] == "ready")
    assert ready_event["url"] == url.rstrip("/")
    assert ready_event["phases"]["worker: weights"] == 0.25


def test_active_requests_finish_after_a_signal(server_run: ServerRun) -> None:
    def probe_while_draining(http: httpx.Client) -> Any:
        send_signal(signal.SIGTERM)
        while http.get("/ready").status_code == 200:
            pass
        return http.post("/v1/completions", json=make_body(1)), http.get("/health").status_code

    def use_server(http: httpx.Client) -> Any:
        with httpx.Client(base_url=http.base_url, timeout=60) as probe_client:
            return read_stream(http, 500, lambda: probe_while_draining(probe_client))

    status, (events, (refused_response, health_status)) = server_run.serve(use_server)
    assert status == 0
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == "a" * 500
    assert refused_response.status_code == 503
    assert refused_response.headers["retry-after"] == "1"
    assert refused_response.headers["connection"] == "close"
    assert health_status == 200


def test_requests_that_exceed_the_grace_period_end_with_an_error(server_run: ServerRun) -> None:
    def use_server(http: httpx.Client) -> Any:
        return read_stream(http, 4000, lambda: send_signal(signal.SIGTERM))

    status, (events, _) = server_run.serve(use_server, shutdown_grace=0.2)
    assert status == 1
    assert len(events) < 2000
    assert json.loads(events[-1])["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_stops_the_server_at_once(server_run: ServerRun, number: int, expected: int) -> None:
    def send_two_signals(http: httpx.Client) -> None:
        send_signal(signal.SIGTERM)
        while http.get("/ready").status_code == 200:
            pass
        send_signal(number)

    def use_server(http: httpx.Client) -> int:
        with httpx.Client(base_url=http.base_url, timeout=60) as probe_client:
            try:
                return len(read_stream(http, 4000, lambda: send_two_signals(probe_client))[0])
            except httpx.TransportError:
                return 0

    status, num_events = server_run.serve(use_server)
    assert status == expected
    assert num_events < 2000


def test_requests_during_loading_get_an_error(server_run: ServerRun) -> None:
    may_load = threading.Event()

    def load_slowly() -> WorkerRuntime:
        assert may_load.wait(60)
        return make_runtime()

    def use_server(http: httpx.Client) -> Any:
        early_response = http.post("/v1/completions", json=make_body(1))
        probes = [http.get(path).status_code for path in ("/health", "/ready", "/version", "/metrics")]
        may_load.set()
        assert server_run.ready.wait(60)
        late_response = http.post("/v1/completions", json=make_body(1))
        send_signal(signal.SIGTERM)
        return early_response, probes, late_response

    status, (early_response, probes, late_response) = server_run.serve(
        use_server, load_slowly, waits_until_ready=False
    )
    assert status == 0
    assert early_response.status_code == 503
    assert early_response.headers["retry-after"] == "1"
    assert "being loaded" in early_response.json()["error"]["message"]
    assert probes == [503, 503, 200, 200]
    assert late_response.status_code == 200


def test_a_signal_during_loading_stops_the_server(server_run: ServerRun) -> None:
    may_load = threading.Event()

    def load_slowly() -> WorkerRuntime:
        assert may_load.wait(60)
        return make_runtime()

    def load_tokenizer() -> FakeTokenizer:
        send_signal(signal.SIGTERM)
        threading.Timer(0.2, may_load.set).start()
        return FakeTokenizer()

    status, _ = server_run.serve(lambda http: None, load_slowly, load_tokenizer, waits_until_ready=False)
    assert status == 0
    assert not server_run.ready.is_set()


def test_a_load_error_is_raised_to_the_caller(server_run: ServerRun) -> None:
    def fail_to_load() -> WorkerRuntime:
        raise CheckpointError("/models/x", "is broken")

    def fail_to_load_tokenizer() -> FakeTokenizer:
        raise CheckpointError("/models/y", "has no tokenizer")

    with pytest.raises(CheckpointError, match="/models/x: is broken"):
        server_run.serve(lambda http: None, fail_to_load, waits_until_ready=False)
    with pytest.raises(CheckpointError, match="/models/y"):
        server_run.serve(lambda http: None, make_runtime, fail_to_load_tokenizer, waits_until_ready=False)


def test_a_failed_warm_up_stops_the_server(server_run: ServerRun) -> None:
    """The warm-up request fails before a client sends a request."""

    def fail(context: TextContext) -> int:
        raise ZeroDivisionError

    with pytest.raises(PenstockError):
        server_run.serve(
            lambda http: None,
            lambda: WorkerRuntime(
                scheduler=Scheduler(FakePipeline(fail), max_batch_size=8, isolates_faults=True), info=INFO
            ),
            waits_until_ready=False,
        )


def test_the_warm_up_of_grammars_does_not_delay_readiness(server_run: ServerRun) -> None:
    warm_up_started = threading.Event()

    def choose(context: TextContext) -> int:
        if context.grammar is not None:
            assert server_run.ready.is_set()
            warm_up_started.set()
        return FakeTokenizer.EOS

    def use_server(http: httpx.Client) -> bool:
        has_started = warm_up_started.wait(60)
        send_signal(signal.SIGTERM)
        return has_started

    info = msgspec.structs.replace(INFO, grammars_enabled=True)
    runtime = WorkerRuntime(scheduler=Scheduler(FakePipeline(choose), max_batch_size=8), info=info)
    assert server_run.serve(use_server, lambda: runtime) == (0, True)


def test_idle_connections_do_not_delay_the_shutdown(server_run: ServerRun) -> None:
    def use_server(http: httpx.Client) -> int:
        http.get("/health")  # the client keeps the connection open
        send_signal(signal.SIGTERM)
        return 0

    assert server_run.serve(use_server) == (0, 0)


@pytest.mark.parametrize(
    "request_bytes",
    [b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"],
)
def test_invalid_http_gets_an_error_and_the_connection_is_closed(
    server_run: ServerRun, request_bytes: bytes
) -> None:
    def use_server(http: httpx.Client) -> bytes:
        with connect(http) as connection:
            connection.sendall(request_bytes)
            # Read until the server closes the connection.
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        send_signal(signal.SIGTERM)
        return answer

    status, answer = server_run.serve(use_server)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status == 0
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("request_bytes", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: "])
def test_a_connection_without_a_complete_request_is_closed_but_a_stream_is_not(
    server_run: ServerRun, request_bytes: bytes
) -> None:
    def use_server(http: httpx.Client) -> bytes:
        with connect(http) as connection:
            connection.sendall(request_bytes)
            answer = connection.recv(4096)
        # The stream takes 400 x 4 ms, longer than `body_timeout`.
        assert read_stream(http, 400, lambda: None)[0][-1] == "[DONE]"
        send_signal(signal.SIGTERM)
        return answer

    assert server_run.serve(use_server, body_timeout=1) == (0, b"")


def test_a_connection_with_an_incomplete_later_request_is_closed(server_run: ServerRun) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"

    def exchange_bytes(connection: socket.socket, *request_parts: bytes) -> bytes:
        for request_part in request_parts:
            connection.sendall(request_part)
            time.sleep(0.1)
        answer = b""
        while not answer.endswith(b"}") and (received_bytes := connection.recv(4096)):
            answer += received_bytes
        return answer

    def use_server(http: httpx.Client) -> list[bytes]:
        with connect(http) as connection:
            answers = [
                exchange_bytes(connection, request),
                exchange_bytes(connection, request[:10], request[10:]),
            ]
            time.sleep(2.2)  # longer than `body_timeout`, which does not apply to an idle connection
            answers += [exchange_bytes(connection, request), exchange_bytes(connection, request[:10])]
        send_signal(signal.SIGTERM)
        return answers

    status, answers = server_run.serve(use_server, body_timeout=2)
    assert status == 0
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 3 + [b""]


def test_a_too_long_body_is_refused(server_run: ServerRun) -> None:
    def use_server(http: httpx.Client) -> httpx.Response:
        answer = http.post("/v1/completions", json=[1] * 2_000_000)
        send_signal(signal.SIGTERM)
        return answer

    status, answer = server_run.serve(use_server, max_body_size=100_000)
    assert (status, answer.status_code) == (0, 413)


def test_invalid_addresses_and_used_ports_are_refused() -> None:
    with listening_socket("127.0.0.1", 0) as listener_in_use:
        port = listener_in_use.getsockname()[1]
        assert url_of(listener_in_use) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError) as exc_info:
            listening_socket("127.0.0.1", port)
        assert str(exc_info.value) == f"port: cannot listen at 127.0.0.1:{port}: Address already in use"
    with pytest.raises(ConfigError, match=r"host: cannot listen at no\.such\.host\.invalid:0: Name"):
        listening_socket("no.such.host.invalid", 0)
    invalid_hosts = "192.0.2.1 a..b a\0b 1.2.3.4.5 2001:db8::1 ::1%nothing café..de"
    for host in (*invalid_hosts.split(), "x" * 70):
        with pytest.raises(ConfigError, match=r"^host: cannot listen at"):
            listening_socket(host, 0)
    if socket.has_ipv6:
        with listening_socket("::1", 0) as listener:
            assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local


def test_the_startup_time_counts_from_the_start_of_the_process() -> None:
    assert 0 < process_age() < 24 * 3600
    startup = Startup()
    with startup.phase("a"):
        pass
    assert startup.phases[0].name == "a"
    assert startup.seconds >= process_age() - 1

"""The lifecycle of a server: start, serve, drain, stop.

The worker process starts when the files of the model are found. It imports torch and loads the model while
this process imports the HTTP framework and reads the tokenizer. The socket listens from the beginning. When
the routes exist, the server answers 503 with Retry-After until the model is loaded and warmed up. Slow
imports are inside the functions that need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, PenstockError
from penstock.host.garbage_collection import gc_disabled
from penstock.serve.config import ServeConfig
from penstock.serve.http.startup import Startup, report_ready
from penstock.serve.observability.logs import configure_logging, log_event

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.serve.http.server import HttpServer
    from penstock.serve.services import Services
    from penstock.text.tokenizer import TextTokenizer
    from penstock.worker.engine_client import EngineClient

_log = logging.getLogger(__name__)

_GIL_SWITCH_INTERVAL = 0.001
"""Seconds after which a pool thread yields the GIL to the event loop. Python's default is 0.005."""
SHUTDOWN_TIMEOUT = 2.0
"""Seconds at shutdown that aborted requests have to send their final errors."""


class Server:
    """Runs the HTTP server and its worker once, from the start to the shutdown.

    Args:
        config: the configuration of the server.
        pipeline_config: the configuration of the model.
        worker: the engine client, not launched yet.
        load_tokenizer: loads the tokenizer in this process.
        startup: measures the phases of the start.
    """

    def __init__(
        self,
        config: ServeConfig,
        pipeline_config: PipelineConfig,
        worker: EngineClient,
        load_tokenizer: Callable[[], TextTokenizer],
        startup: Startup,
    ) -> None:
        self._config = config
        self._pipeline_config = pipeline_config
        self._load_tokenizer = load_tokenizer
        self._startup = startup
        self._worker = worker
        self._received_signals: list[int] = []
        self._stop_event = asyncio.Event()

    def run(self) -> int:
        """Serve until a signal arrives.

        Returns:
            The exit status: 0 after a clean shutdown, 1 if requests were aborted, 128 plus the signal number
            if a second signal ended the server immediately.

        Raises:
            ConfigError: the server cannot listen at the address, or cannot use ``--state-dir``.
            PenstockError: the model cannot be found, loaded or warmed up, or a package is missing.
        """
        configure_logging(self._config)
        sys.setswitchinterval(_GIL_SWITCH_INTERVAL)
        with listening_socket(self._config.host, self._config.port) as listener:
            with self._startup.phase("find the model"):  # may download the files, which the worker then uses
                self._pipeline_config.model.checkpoint  # noqa: B018
            with self._startup.phase("start the worker's process"):
                self._worker.launch()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> int:
        main_task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert main_task is not None
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._on_signal, signal_number, main_task)
        load_task = asyncio.create_task(self._worker.start())
        try:
            services, server = await asyncio.to_thread(self._make_server)
            async with server.listening(listener):
                await self._serve(services, load_task, listener)
                return await self._drain(services)
        except asyncio.CancelledError:
            if len(self._received_signals) < 2:
                raise
            main_task.uncancel()
            return 128 + self._received_signals[-1]
        finally:
            load_task.cancel()
            await asyncio.gather(load_task, return_exceptions=True)
            await self._worker.stop(0)

    def _on_signal(self, signal_number: int, main_task: asyncio.Task[int]) -> None:
        self._received_signals.append(signal_number)
        self._stop_event.set()
        if len(self._received_signals) > 1:
            main_task.cancel()

    def _make_server(self) -> tuple[Services, HttpServer]:
        """Create the services and the HTTP server. Runs in a thread while the worker loads the model."""
        with gc_disabled(), self._startup.phase("import the HTTP framework"):
            from penstock.serve.app import create_app
            from penstock.serve.http.server import HttpServer
            from penstock.serve.service_factory import build_services
        config = self._config
        with self._startup.phase("read the tokenizer"):
            tokenizer = self._load_tokenizer()
        with self._startup.phase("make the routes"):
            services = build_services(config, self._pipeline_config, self._worker, tokenizer)
            return services, HttpServer(create_app(services), config)

    async def _serve(
        self, services: Services, load_task: asyncio.Task[None], listener: socket.socket
    ) -> None:
        """Accept requests when the model is loaded and warmed up, and return at the first signal."""
        stop_task = asyncio.create_task(self._stop_event.wait())
        try:
            with self._startup.phase("wait for the worker"):
                await asyncio.wait([load_task, stop_task], return_when=asyncio.FIRST_COMPLETED)
            if self._stop_event.is_set():
                return
            load_task.result()
            await self._warm_up_and_open(services, listener)
            background_tasks = [
                asyncio.create_task(self._watch()),
                asyncio.create_task(self._finish_warm_up(services)),
            ]
            await stop_task
            for task in background_tasks:
                task.cancel()
        finally:
            stop_task.cancel()

    async def _warm_up_and_open(self, services: Services, listener: socket.socket) -> None:
        from penstock.serve.warmup import warm_up_model

        info = self._worker.info
        services.tokenizer.max_length = info.max_length
        self._startup.add_worker(info.startup)
        with self._startup.phase("warm up"):
            await warm_up_model(self._worker, services.tokenizer, services.task)
        gc.collect()
        gc.freeze()  # the collector then skips these objects, which live as long as the server
        services.gate.open()
        if self._config.state_dir is not None:
            from penstock.serve.batches.batch_manager import BatchManager

            services.states.of(BatchManager).start()
        services.metrics.describe_build(model=services.model_name, isa=info.isa)
        services.metrics.report_startup((phase.name, phase.seconds) for phase in self._startup.phases)
        url = url_of(listener)
        report_ready(self._startup, url, services.model_name, self._config.log_format)
        from penstock.serve.http.origins import is_loopback

        if not self._config.api_key and not is_loopback(self._config.host):
            log_event(
                _log,
                logging.WARNING,
                "the server accepts requests from other machines without an API key: set --api-key",
                url=url,
            )

    async def _watch(self) -> None:
        from penstock.serve.observability.watchdog import Watchdog

        await Watchdog(self._worker, self._config.watchdog_timeout).run()

    async def _finish_warm_up(self, services: Services) -> None:
        """Warm up grammars. Runs after the gate has opened, because many servers never use grammars."""
        from penstock.serve.warmup import warm_up_grammars

        if self._worker.info.grammars_enabled:
            try:
                await warm_up_grammars(self._worker, services.tokenizer)
            except PenstockError as error:
                log_event(_log, logging.WARNING, "the warm-up of grammars failed", error=str(error))

    async def _drain(self, services: Services) -> int:
        """Refuse new requests, wait for active ones, abort overdue ones, and stop. Return the exit status."""
        from penstock.serve.service_factory import close_services

        gate, grace = services.gate, self._config.shutdown_grace
        gate.close()
        log_event(_log, logging.INFO, "stopping", requests=gate.num_active, grace_s=grace)
        is_clean = await gate.wait_until_idle(grace)
        if not is_clean:
            log_event(_log, logging.WARNING, "requests are aborted", requests=gate.num_active)
        await self._worker.stop(0)
        await gate.wait_until_idle(SHUTDOWN_TIMEOUT)
        for pool in (services.pool, services.large_body_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        await close_services(services)
        log_event(_log, logging.INFO, "stopped", clean=is_clean)
        return 0 if is_clean else 1


_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
"""Error numbers of socket failures that another port may avoid."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Connections wait in the socket's backlog until the server accepts them.

    Raises:
        ConfigError: for ``port`` if the port is in use or reserved, else for ``host``.
    """
    if not _is_host_name(host):  # create_server leaks a socket if the name is malformed
        raise ConfigError("host", f"cannot listen at {host!r}: it is neither an address nor a host name")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # create_server adds " (while ..."
        field = "port" if error.errno in _PORT_ERRORS else "host"
        raise ConfigError(field, f"cannot listen at {host}:{port}: {reason}") from error


def _is_host_name(host: str) -> bool:
    """Return whether a name has no null byte, no empty label and no label that is too long."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return "\0" not in host


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of uvloop if it is installed, else None for asyncio's default."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop  # type: ignore[no-any-return]
    return None

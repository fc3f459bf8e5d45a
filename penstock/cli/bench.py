"""``penstock bench``: benchmarks of a model or a server."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import closing
from pathlib import Path
from socket import gaierror
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from penstock.cli.bench_run import command as run
from penstock.cli.plotting import check_plot
from penstock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from penstock.bench.http_client import HttpClient
    from penstock.bench.prompts import BenchPrompt, EndpointName


class _ServeOptions(TypedDict):
    """The options of ``penstock bench serve``."""

    url: str
    api_key: str | None
    model: str | None
    endpoint: EndpointName
    concurrency: int | None
    rate: float | None
    num_requests: int
    input_length: int
    output_length: int
    prompts: Path | None
    stream: bool
    ignore_eos: bool
    temperature: float
    extra_body: str | None
    warmup: int
    seed: int
    timeout: float
    json_path: Path | None
    plot_path: Path | None


_NUM_ROUND_TRIPS = 50
"""Number of small requests between warm-up and measurement, for the round-trip time of the idle server."""


@click.group("bench")
def command() -> None:
    """Benchmark a model in this process, or a server."""


command.add_command(run)


@command.command("serve")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@click.option("--api-key", envvar="PENSTOCK_API_KEY", help="The API key for the server.")
@click.option("--model", help="The model to request; by default the first that the server lists.")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Number of concurrent requests: when one ends, the next is sent. With --rate, their maximum "
    "number.  [default: 8; with --rate no limit]",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests per second, sent at random times that do not depend on responses. Latencies count from "
    "the scheduled time of a request.",
)
@click.option("--requests", "num_requests", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--input-length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Tokens in each random prompt; approximate for the endpoint chat.",
)
@click.option(
    "--output-length", type=click.IntRange(1), default=64, show_default=True, help="Tokens in each response."
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of prompts instead of random prompts: one per line, or .jsonl with prompt or messages.",
)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Generate exactly --output-length tokens. Not every server supports the request field ignore_eos.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--extra-body", metavar="JSON", help="A JSON object of further fields for each request.")
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help="Warm-up requests before the measurement.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random prompts, the send times and the sampling.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds after which a request counts as failed.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures to this file.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot to this PNG file.",
)
def serve(**options: Unpack[_ServeOptions]) -> int:
    """Benchmark an OpenAI-compatible server: throughput and latencies under load.

    The exit status is 0 if all requests succeeded, 1 if a request failed, and 130 after Ctrl-C. After Ctrl-C
    the figures of all requests sent so far are printed and written.
    """
    if options["plot_path"] is not None:
        check_plot()
    for path in (options["json_path"], options["plot_path"]):
        if path is not None:
            path.touch()  # raises before the measurement if the file cannot be written
    return asyncio.run(_serve(options))


async def _serve(options: _ServeOptions) -> int:
    from penstock.bench.http_client import HttpClient

    key = options["api_key"]
    headers = {"Authorization": f"Bearer {key}"} if key else None
    with closing(HttpClient(options["url"], headers)) as client:
        return await _measure(client, options)


async def _measure(client: HttpClient, options: _ServeOptions) -> int:
    from rich.console import Console

    from penstock.bench.load import Load, measure, round_trips
    from penstock.bench.prompts import RequestTemplate, parse_fields
    from penstock.bench.report import plot, print_summary
    from penstock.bench.summary import Summary, build_report

    count, endpoint = options["num_requests"], options["endpoint"]
    extra_fields = parse_fields(options["extra_body"]) if options["extra_body"] else {}
    model, prompts = await _model_and_prompts(client, options)
    template = RequestTemplate(
        endpoint=endpoint,
        model=model,
        output_length=options["output_length"],
        stream=options["stream"],
        ignore_eos=options["ignore_eos"],
        temperature=options["temperature"],
        seed=options["seed"],
        extra_fields=extra_fields,
    )
    bodies = [template.body(index, prompt) for index, prompt in enumerate(prompts)]
    concurrency = options["concurrency"] or (None if options["rate"] else 8)
    stop_event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop_event.set)
    if bodies[count:]:
        warmup = await measure(client, template.path, bodies[count:], Load(concurrency=8), stop=stop_event)
        failed_outcomes = [outcome for outcome in warmup.outcomes if outcome.error is not None]
        if failed_outcomes and len(failed_outcomes) == len(warmup.outcomes) and not stop_event.is_set():
            raise InputError(
                f"every warm-up request failed: {failed_outcomes[0].error}: {failed_outcomes[0].detail}"
            )
    idle_round_trips = await round_trips(client, "/v1/models", _NUM_ROUND_TRIPS)
    load = Load(
        concurrency=concurrency, rate=options["rate"], timeout=options["timeout"], seed=options["seed"]
    )
    result = await measure(client, template.path, bodies[:count], load, stop=stop_event)
    result.round_trips = idle_round_trips
    summary = Summary.from_measurement(result)
    print_summary(summary, Console())
    shown_options = [
        (name, value) for name, value in options.items() if name not in ("api_key", "extra_body")
    ]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in shown_options}
    if options["json_path"] is not None:
        report = build_report(
            result, settings | {"model": model, "extra_body": extra_fields, "concurrency": concurrency}
        )
        options["json_path"].write_text(json.dumps(report, indent=2))
    if options["plot_path"] is not None:
        load_description = (
            f"{options['rate']:g} requests/s" if options["rate"] else f"{concurrency} at a time"
        )
        plot(result, f"{model}, {endpoint}, {load_description}", options["plot_path"])
    if result.is_interrupted:
        return 130
    return 1 if summary.errors else 0


async def _model_and_prompts(client: HttpClient, options: _ServeOptions) -> tuple[str, list[BenchPrompt]]:
    """Return the model name and the prompts: first for the measurement, then for the warm-up.

    Raises:
        ConfigError: the server does not answer.
        InputError: the server or the file of prompts cannot supply the model name or the prompts.
    """
    from penstock.bench.http_client import IncompleteResponseError
    from penstock.bench.prompts import random_prompts, read_prompts, repeat_prompts, served_model

    count = options["num_requests"] + options["warmup"]
    try:
        model = options["model"] or await served_model(client)
        if options["prompts"] is not None:
            return model, repeat_prompts(read_prompts(options["prompts"]), count)
        length, seed = options["input_length"], options["seed"]
        return model, await random_prompts(client, model, options["endpoint"], count, length, seed)
    except (ConnectionError, IncompleteResponseError, TimeoutError, gaierror) as error:
        raise ConfigError("url", f"{options['url']} does not answer: {error}") from None

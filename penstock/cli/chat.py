"""``penstock chat``: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import click

from penstock.cli.chat_backends import ChatBackend, LocalBackend, ServerBackend
from penstock.cli.chat_session import ChatSession
from penstock.cli.formatting import GroupedCommand, GroupedOption
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.errors import PenstockError

DEFAULT_MAX_TOKENS = 1024
_MAX_HISTORY_LINES = 1000
"""Maximum number of lines in the file with the input history."""

sampling_option = partial(click.option, cls=GroupedOption, group="Sampling")


@click.command("chat", cls=GroupedCommand)
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--url",
    metavar="URL",
    help="Use the server at this address, which has the OpenAI API. MODEL is a model name of the server.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar=["PENSTOCK_API_KEY", "OPENAI_API_KEY"],
    help="API key of the server; also PENSTOCK_API_KEY or OPENAI_API_KEY.",
)
@click.option("--load", type=click.Path(path_type=Path), help="Continue a saved conversation.")
@sampling_option("--temperature", type=float, help="Randomness: values above 1 increase it, 0 is greedy.")
@sampling_option("--top-k", type=int, help="Sample from the K most probable tokens.")
@sampling_option(
    "--top-p", type=float, help="Sample from the most probable tokens whose total probability reaches P."
)
@sampling_option(
    "--min-p", type=float, help="Sample from tokens with at least this share of the highest probability."
)
@sampling_option("--seed", type=int, help="The seed of sampling.")
@sampling_option(
    "--max-new-tokens",
    "max_tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Maximum number of tokens of an answer.",
)
@config_options
def command(
    system: str | None,
    url: str | None,
    api_key: str | None,
    load: Path | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    max_tokens: int,
    print_config: bool,
    **flags: object,
) -> None:
    """Chat in the terminal with a model that runs in this process or on a server.

    /help lists the commands. Ctrl-C stops an answer, and Ctrl-D ends the chat.
    """
    sampling_values = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    settings: dict[str, object] = {
        name: value for name, value in sampling_values.items() if value is not None
    }
    if url is not None:
        local_options = sorted(
            name for name, value in flags.items() if value not in (None, ()) and name != "model"
        )
        if local_options or print_config:
            name = local_options[0] if local_options else "print_config"
            raise click.UsageError(
                f"--{name.replace('_', '-')} is for a model in this process: omit it, or omit --url"
            )
        model = flags["model"]
        _converse(ServerBackend(url, None if model is None else str(model), api_key), system, settings, load)
        return
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    from penstock import LLM  # loads torch

    with LLM.from_config(config) as llm:
        _converse(LocalBackend(llm), system, settings, load)


def _converse(
    backend: ChatBackend, system: str | None, settings: dict[str, object], load: Path | None
) -> None:
    """Read lines and handle them until the end of the input or a command that ends the chat."""
    session = ChatSession(backend, system, settings)
    if load is not None:
        session.load(load)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(f"{backend.name}: /help lists the commands, Ctrl-D ends the chat", err=True)
    with _history() if is_terminal else nullcontext():
        while True:
            try:
                text = _read("> " if is_terminal else "")
                if text.strip() and not session.handle(text.strip()):
                    return
            except EOFError:
                if is_terminal:
                    click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\nCtrl-D or /exit ends the chat", err=True)
            except PenstockError as error:
                click.echo(f"penstock: {error}", err=True)


def _read(prompt: str) -> str:
    r"""Return the next input: a line, lines joined by ``\``, or the lines between two lines ``\"\"\"``.

    Raises:
        EOFError: the input has ended.
    """
    continuation_prompt = "... " if prompt else ""
    line = input(prompt)
    if line.strip() == '"""':
        lines = []
        while (line := input(continuation_prompt)).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(continuation_prompt))
    return "\n".join(lines)


@contextmanager
def _history() -> Iterator[None]:
    """Load the input history from a file and store it at the end, if Python has the module ``readline``."""
    try:
        import readline
    except ImportError:
        yield
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    path = cache / "penstock" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(_MAX_HISTORY_LINES)
            readline.write_history_file(path)
            path.chmod(0o600)

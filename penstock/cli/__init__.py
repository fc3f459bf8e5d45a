"""The command ``penstock``.

A user's mistake is one line on standard error and exit status 2. Commands are loaded when they are run, and
torch when there is something to compute, so that ``--help`` is quick.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

import penstock
from penstock.cli.formatting import unknown_command
from penstock.errors import PenstockError

_COMMANDS = {
    "generate": "Generate text from a prompt, as it comes.",
    "serve": "Serve a model to OpenAI's clients.",
    "bench": "Measure a model, or a server.",
    "list": "List architectures, encodings, tasks and formats.",
    "warm-cache": "Download a model and check it, ahead of its use.",
    "env": "Show what Penstock runs on: versions, processor, devices, kernels.",
}
"""Name -> short help; the command is ``command`` in the module of that name, with ``_`` for ``-``."""


_MAX_MESSAGE = 2000


class _Commands(click.Group):
    """The group of all commands, which turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]  # not list(): once penstock.cli.list is imported, that is the module

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"penstock.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise unknown_command(args[0], _COMMANDS, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*_COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows what it can
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
            _flush()
        except click.Abort:
            sys.exit(130)
        except click.ClickException as error:
            _fail(error.format_message())
        except PenstockError as error:
            _fail(" ".join([str(error), *getattr(error, "__notes__", ())]))
        except MemoryError:
            _fail("out of memory: use a smaller model, --max-length or --max-batch-size")
        except OSError as error:
            _fail(_explained(error))
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            _fail(f"out of memory: {error}")
        sys.exit(code if isinstance(code, int) else 0)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(penstock.__version__, prog_name="penstock", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """LLM inference, from the prompt to the turbine and back.

    Completion in a shell: put eval "$(_PENSTOCK_COMPLETE=bash_source penstock)" into ~/.bashrc; for other
    shells write zsh_source or fish_source.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Runs the command line; does not return."""
    atexit.register(gc.freeze)  # all goes with the process: a last look at it would take half a second
    cli.main(prog_name="penstock")


def _fail(message: str) -> NoReturn:
    """One line and status 2. Whatever the user's input put into the message, it is short and printable."""
    line = " ".join(message.split())
    if len(line) > _MAX_MESSAGE:
        line = f"{line[: _MAX_MESSAGE // 2]} ... {line[-_MAX_MESSAGE // 2 :]}"
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    click.echo(f"penstock: error: {line}", err=True)
    sys.exit(2)


def _explained(error: OSError) -> str:
    where = error.filename
    if where is None and error.errno == errno.ENOSPC:
        where = "standard output"
        sys.stdout = None  # what it still holds cannot be written at exit either
    return f"{where}: {error.strerror}" if where is not None else str(error)


def _flush() -> None:
    """Brings what was printed out while its failing can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()

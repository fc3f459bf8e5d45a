"""The command ``penstock``.

An error that the user can fix is printed as one line on standard error, with exit status 2. The module of a
command is imported when the command runs or shows its help, and torch only when a command needs it.
``--help`` is therefore fast.
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
    "generate": "Generate text from a prompt and stream it.",
    "chat": "Chat with a model in the terminal.",
    "speak": "Convert a text to speech.",
    "encode": "Compute embeddings of texts.",
    "rerank": "Order documents by their score for a query.",
    "serve": "Serve a model through an OpenAI-compatible API.",
    "batch": "Run a file of requests without a server.",
    "bench": "Benchmark a model or a server.",
    "list": "List architectures, encodings, tasks and formats, or downloaded models.",
    "pull": "Download a model from the hub.",
    "rm": "Delete a downloaded model.",
    "warm-cache": "Download and check a model in advance.",
    "quantize": "Write a quantized checkpoint.",
    "env": "Show versions, processor, devices and kernels.",
}
"""Name of a command -> short help. The function ``command`` of the module of the same name implements the
command. Module names have ``_`` instead of ``-``."""


_MAX_MESSAGE_LENGTH = 2000  # characters


class _Commands(click.Group):
    """The group of all commands; prints an error as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]  # not list(): an import of penstock.cli.list rebinds `list` in this module

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
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks
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
            _fail("out of memory: use a smaller model, or a lower --max-length or --max-batch-size")
        except OSError as error:
            _fail(_os_error_message(error))
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
    """LLM inference.

    To enable completion in a shell, put eval "$(_PENSTOCK_COMPLETE=bash_source penstock)" into ~/.bashrc; for
    other shells use zsh_source or fish_source.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line and exit the process."""
    atexit.register(gc.freeze)  # skips the final garbage collection, which takes half a second
    atexit.register(_drop_broken_stderr)
    cli.main(prog_name="penstock")


def _fail(message: str) -> NoReturn:
    """Print an error message as one line and exit with status 2. The middle of a long message is left out."""
    line = " ".join(message.split())
    if len(line) > _MAX_MESSAGE_LENGTH:
        line = f"{line[: _MAX_MESSAGE_LENGTH // 2]} ... {line[-_MAX_MESSAGE_LENGTH // 2 :]}"
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    click.echo(f"penstock: error: {line}", err=True)
    sys.exit(2)


def _os_error_message(error: OSError) -> str:
    where = error.filename
    if where is None and error.errno == errno.ENOSPC:
        where = "standard output"
        sys.stdout = None  # Python flushes sys.stdout at exit, which would fail again
    return f"{where}: {error.strerror}" if where is not None else str(error)


def _drop_broken_stderr() -> None:
    """Set ``sys.stderr`` to None if it cannot be flushed, because Python would exit with status 120."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            sys.stderr = None


def _flush() -> None:
    """Flush standard output before the exit, so that `_Commands.main` can report an error."""
    if sys.stdout is not None:
        sys.stdout.flush()

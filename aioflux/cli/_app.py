"""The list of commands, and the exit status of each error."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from aioflux import __version__
from aioflux.cli._cat import cat
from aioflux.cli._ckpt import ckpt
from aioflux.cli._clean import clean
from aioflux.cli._cp.command import cp
from aioflux.cli._event_loop import EndedBySignal
from aioflux.cli._ls import ls
from aioflux.cli._output import DEBUG, UNENCODABLE, print_error
from aioflux.cli._rm import rm
from aioflux.cli._serve import serve
from aioflux.cli._stat import stat

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="aioflux",
    help="Object storage at the speed of the network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for _command in (ls, cat, cp, rm, stat, clean, serve):
    app.command()(_command)
app.add_typer(ckpt)

# typer has its own copy of click or uses an installed one, depending on its version.
_ClickError = typer.BadParameter.__mro__[2]


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"aioflux {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Arguments are uris (gs://bucket/key, file:///dir/name) or local paths."""
    if debug:
        os.environ[DEBUG] = "1"


def run_app() -> int:
    """Run one command and return its exit status.

    An error is printed to stderr in one line, or as a traceback with `--debug`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=UNENCODABLE)
    try:
        status = app(prog_name="aioflux", standalone_mode=False)
    except EndedBySignal as exc:
        if exc.number == signal.SIGPIPE:
            _discard_stdout()
        return 128 + exc.number
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except Exception as exc:  # not raised: `print_error` prints a traceback if it is wanted
        if isinstance(exc, _ClickError):
            _print_usage_error(exc)
            return int(getattr(exc, "exit_code", 2))
        print_error(exc)
        return 1
    return status if isinstance(status, int) else 0


def _print_usage_error(exc: BaseException) -> None:
    message = str(getattr(exc, "format_message", lambda: exc)()).rstrip()
    if not message:  # the help was printed
        return
    context = getattr(exc, "ctx", None)
    path = context.command_path if context else "aioflux"
    print_error(f"{message} (see {path} --help)")


def _discard_stdout() -> None:
    """Discard the output that is still buffered: the reader of the pipe has closed it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)

"""The commands under one name, and how each failure ends: one line on stderr and a status."""

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
from aioflux.cli._cp import cp
from aioflux.cli._event_loop import Stopped
from aioflux.cli._ls import ls
from aioflux.cli._rm import rm
from aioflux.cli._serve import serve
from aioflux.cli._stat import stat
from aioflux.cli._stdout import UNENCODABLE
from aioflux.cli._text import DEBUG, complain_of

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

# typer brings its own copy of click or uses an installed one, depending on its version.
_UsageError, _ClickError = typer.BadParameter.__mro__[1:3]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"aioflux {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of failures.")] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version, and exit."
        ),
    ] = False,
) -> None:
    """Objects are named by uris (gs://bucket/key, file:///dir/name) or by plain local paths."""
    if debug:
        os.environ[DEBUG] = "1"


def run_app(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    The seam where every failure becomes one line: no traceback reaches who did not ask for it.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=UNENCODABLE)
    try:
        status = app(args=arguments, prog_name="aioflux", standalone_mode=False)
    except Stopped as exc:
        if exc.number == signal.SIGPIPE:
            _drop_stdout()
        return 128 + exc.number
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except Exception as exc:  # the one place that lets nothing pass
        return _failed(exc)
    return status if isinstance(status, int) else 0


def _failed(exc: Exception) -> int:
    if isinstance(exc, _ClickError):
        _explain_usage(exc)
        return int(getattr(exc, "exit_code", 2))
    complain_of(exc)
    return 1


def _explain_usage(exc: BaseException) -> None:
    message = str(getattr(exc, "format_message", lambda: exc)()).rstrip()
    if not message:  # the help was the answer
        return
    context = getattr(exc, "ctx", None)
    path = context.command_path if context else "aioflux"
    typer.echo(f"{path}: {message} (see {path} --help)", err=True)


def _drop_stdout() -> None:
    """Let nothing more be written to a pipe that nobody reads, at the exit neither."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

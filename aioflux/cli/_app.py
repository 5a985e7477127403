"""The list of commands, and the exit status of each error."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Annotated

import typer

from aioflux import __version__
from aioflux.cli._event_loop import EndedBySignal
from aioflux.cli._output import UNENCODABLE, print_error
from aioflux.cli._settings import settings, with_common_options

app = typer.Typer(
    name="aioflux",
    help="Object storage at the speed of the network.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_COMMANDS = {
    "ls": "_ls",
    "cat": "_objects",
    "cp": "_cp.command",
    "mv": "_cp.command",
    "sync": "_cp.sync",
    "rm": "_rm",
    "stat": "_objects",
    "du": "_ls",
    "sign": "_objects",
    "clean": "_rm",
    "doctor": "_doctor",
    "serve": "_serve",
    "ckpt": "_ckpt",
}
"""Module of each command, in the order of the help. The function has the name of the command."""
_added: set[str] = set()

# typer has its own copy of click or uses an installed one, depending on its version.
_ClickError = typer.BadParameter.__mro__[2]


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"aioflux {__version__}")
        raise typer.Exit


@app.callback()
@with_common_options
def _group(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Arguments are uris (gs://bucket/key, file:///dir/name) or local paths."""


def run_app() -> int:
    """Run one command and return its exit status.

    An error is printed to stderr in one line, or as a traceback with `--debug`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=UNENCODABLE)
    try:
        settings.reset()
        _add_commands(sys.argv[1:])
        status = app(prog_name="aioflux", standalone_mode=False)
    except EndedBySignal as exc:
        if exc.number == signal.SIGPIPE:
            _discard_stdout()
        return 128 + exc.number
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except SystemExit as exc:  # the help was printed to a pipe that its reader has closed
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except Exception as exc:  # not raised: `print_error` prints a traceback if it is wanted
        if isinstance(exc, _ClickError):
            _print_usage_error(exc)
            return int(getattr(exc, "exit_code", 2))
        print_error(exc)
        return 1
    return status if isinstance(status, int) else 0


def _add_commands(arguments: list[str]) -> None:
    """Import and add the command that the arguments name, or all commands if they name none.

    typer builds a pydantic validator for each parameter of each command: all of them take 40 ms.
    """
    name = next((argument for argument in arguments if argument in _COMMANDS), "")
    for each in (name,) if name else _COMMANDS:
        if each not in _added:
            _added.add(each)
            command = getattr(import_module(f"aioflux.cli.{_COMMANDS[each]}"), each)
            if isinstance(command, typer.Typer):
                app.add_typer(command)
            else:
                app.command()(command if each == "serve" else with_common_options(command))


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

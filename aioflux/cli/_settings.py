"""The options that every command has, before or after its name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

DEBUG = "AIOFLUX_DEBUG"
"""Environment variable that turns tracebacks on."""

CONNECT_DEADLINE = "AIOFLUX_CONNECT_DEADLINE"
"""Environment variable with the seconds for which commands try to connect."""

ENDPOINT_URL = "AIOFLUX_ENDPOINT_URL"
"""Environment variable with the default of `--endpoint-url`."""

_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(slots=True)
class CommonOptions:
    """Values of the options of all commands, for the one command that this process runs."""

    endpoint_url: str = ""
    """Endpoint of the service; empty for the environment's, or else the service's default."""
    anonymous: bool = False
    """Whether to send requests without credentials."""
    max_in_flight: int = 0
    """Most requests in flight for each store; 0 for the default of `TransferOptions`."""
    connect_deadline: float = 0.0
    """Seconds for which to try to connect to a server that is away."""
    quiet: bool = False
    """Whether only errors are printed to stderr."""
    log_level: str = ""
    """Least level of the log records that are printed, such as "INFO"; empty for none."""
    debug: bool = False
    """Whether errors are shown with their traceback."""

    def reset(self) -> None:
        """Set the defaults, and those that environment variables give.

        Raises:
            BadParameter: The value of a variable is not valid.
        """
        self.__init__()  # type: ignore[misc]
        self.debug = os.environ.get(DEBUG, "0") not in {"", "0"}
        text = os.environ.get(CONNECT_DEADLINE) or "3"
        try:
            self.connect_deadline = float(text)
        except ValueError:
            raise typer.BadParameter(
                f"{CONNECT_DEADLINE}={text} is not a time in seconds"
            ) from None


settings = CommonOptions()
"""The options of the command that runs."""


def set_options(
    *,
    endpoint_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Another endpoint for gs://, s3:// or az://, such as an emulator. Default: the "
            "environment variables AIOFLUX_ENDPOINT_URL, STORAGE_EMULATOR_HOST and "
            "AWS_ENDPOINT_URL_S3.",
        ),
    ] = "",
    anonymous: Annotated[
        bool,
        typer.Option(
            "--anonymous", help="Use gs://, s3:// or az:// without credentials (public buckets)."
        ),
    ] = False,
    max_in_flight: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, help="Most requests at a time; default 64."),
    ] = None,
    connect_deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long to try to connect to a server that is away. Default: 3, or the "
            "environment variable AIOFLUX_CONNECT_DEADLINE.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print what is logged, as --log-level info.")
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", show_default=False, help="debug, info, warning or error: print logs."
        ),
    ] = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Set the options that are given; others keep their values.

    Raises:
        BadParameter: The log level is unknown.
    """
    if log_level and log_level.lower() not in _LOG_LEVELS:
        raise typer.BadParameter(f"--log-level {log_level}: use {', '.join(_LOG_LEVELS)}")
    level = log_level or ("info" if verbose else "")
    settings.log_level = level.upper() or settings.log_level
    settings.endpoint_url = endpoint_url or settings.endpoint_url
    settings.max_in_flight = max_in_flight or settings.max_in_flight
    settings.anonymous |= anonymous
    settings.quiet |= quiet
    settings.debug |= debug
    if connect_deadline is not None:
        settings.connect_deadline = connect_deadline


_OPTIONS = inspect.signature(set_options, eval_str=True).parameters


def with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that also takes the options of all commands, and sets them."""

    @wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        set_options(**{name: options.pop(name) for name in _OPTIONS})
        return function(*arguments, **options)

    own = inspect.signature(function, eval_str=True)
    parameters = [*own.parameters.values(), *_OPTIONS.values()]
    vars(command)["__signature__"] = own.replace(parameters=parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command

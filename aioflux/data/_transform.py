"""Calls of the user's transform, with errors that name the sample, and a check that it pickles."""

from __future__ import annotations

from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["apply_transform", "check_pickles"]


def apply_transform(sample: Any, transform: Callable[[Any], Any] | None, *, uri: str = "") -> Any:
    """Return the result of `transform` for a sample, or for a record of the object `uri`."""
    if transform is None:
        return sample
    uri = uri or sample.uri
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as exc:
        # Raised unchanged, StopIteration would end the caller's iteration without an error.
        raise RuntimeError(f"the transform raised {exc!r} for {uri}") from exc
    except Exception as exc:
        exc.add_note(f"while transforming {uri}")
        raise


def check_pickles(**arguments: Any) -> None:
    """Check that arguments can be pickled, if a worker process is being started.

    Checks only functions, also inside a `partial`: their pickle is just a name, which costs little.
    Does nothing outside the start of a worker: cloudpickle, for example, can pickle lambdas.

    Raises:
        TypeError: An argument is a lambda or a local function.
    """
    if get_spawning_popen() is None:
        return
    for name, value in arguments.items():
        function = value
        while isinstance(function, partial):
            function = function.func
        if isinstance(function, FunctionType):
            try:
                ForkingPickler.dumps(function)
            except Exception as exc:
                raise TypeError(
                    f"{name}={value!r} cannot be pickled, but workers that are started by spawn or "
                    "forkserver receive a pickle of the dataset: define the function at the top of "
                    "a module, and bind arguments with functools.partial"
                ) from exc

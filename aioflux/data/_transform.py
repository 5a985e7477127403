"""Functions of the user: a transform's errors name the sample, and pickling errors the argument."""

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
    """Return the item that `transform` makes of a sample, or of a record of the object `uri`."""
    if transform is None:
        return sample
    uri = uri or sample.uri
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as exc:
        # Raised further, it would end the iteration.
        raise RuntimeError(f"the transform raised {exc!r} for {uri}") from exc
    except Exception as exc:
        exc.add_note(f"while transforming {uri}")
        raise


def check_pickles(**arguments: Any) -> None:
    """Check functions that are about to be pickled for a worker that is being started.

    Only functions, also in a `partial`, are tried: they are pickled by name, which costs nothing.
    Other picklers, such as cloudpickle, accept lambdas too.

    Raises:
        TypeError: One is a lambda or a local function.
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
                    f"{name}={value!r} does not pickle, and workers that are started by spawn or "
                    "forkserver get a pickle of the dataset: define the function at the top of a "
                    "module, and bind arguments with functools.partial"
                ) from exc

"""Functions of the user: errors of a transform name the sample, of its pickling the argument."""

from __future__ import annotations

from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_pickles", "transformed"]


def transformed(sample: Any, transform: Callable[[Any], Any] | None, *, uri: str = "") -> Any:
    """Return what `transform` makes of a sample; the sample itself where there is none.

    Args:
        sample: A `Sample`, or a record of an object.
        transform: The user's.
        uri: Of the object, where it is a record.
    """
    if transform is None:
        return sample
    where = uri or sample.uri
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as exc:
        # Raised further, it would be taken for the end of the data.
        raise RuntimeError(f"the transform raised {exc!r} for {where}") from exc
    except Exception as exc:
        exc.add_note(f"while transforming {where}")
        raise


def check_pickles(**arguments: Any) -> None:
    """Check functions that are about to be pickled for a worker that is being started.

    Only functions themselves, and those in a `partial`, are tried: they are pickled by name, which
    costs nothing. Other picklers, such as cloudpickle, take lambdas too.

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

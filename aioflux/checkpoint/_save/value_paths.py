"""Dotted paths of the parts of a state that cannot be saved, for error messages."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_cycle", "naming_unpicklable"]


@contextmanager
def naming_unpicklable(value: Any, name: str = "") -> Iterator[None]:
    """Replace an error of a block that pickles a value by one that names the unpicklable part.

    Args:
        value: The value.
        name: Path of the value in the state; empty for the whole state.

    Raises:
        TypeError: A part of the value cannot be pickled. Other errors of the block are unchanged.
    """
    try:
        yield
    except (AiofluxError, OSError):
        raise
    except Exception as exc:
        if _is_picklable(value):
            raise
        path, seen = name, {id(value)}
        while part := next((each for each in _parts(value) if _is_culprit(each[1], seen)), None):
            path, value = f"{path}.{part[0]}".lstrip("."), part[1]
            seen.add(id(value))
        raise TypeError(
            f"{path or 'the state'!r} cannot be pickled, because it is a {type(value).__name__}: "
            f"{exc}; remove it from the state, or save a plain value instead"
        ) from exc


def find_cycle(state: Any) -> str | None:
    """Return the path of a dictionary or list that contains itself; None if there is none."""
    waiting: list[tuple[str, Any, frozenset[int]]] = [("", state, frozenset())]
    while waiting:
        path, value, above = waiting.pop()
        if not isinstance(value, Mapping | list):
            continue
        if id(value) in above:
            return path
        below = above | {id(value)}
        waiting += [(f"{path}.{name}".lstrip("."), part, below) for name, part in _parts(value)]
    return None


def _is_culprit(value: Any, seen: set[int]) -> bool:
    return id(value) not in seen and not _is_picklable(value)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the elements of a container, or the attributes of an object, with their names."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(str(index), part) for index, part in enumerate(value)]
    return [] if callable(value) else [*getattr(value, "__dict__", {}).items()]


class _Pickler(pickle.Pickler):
    """Pickler that skips the data of tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return hasattr(obj, "untyped_storage") or None


def _is_picklable(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=2).dump(value)
    except Exception:  # of any class, depending on the value
        return False
    return True

"""Dotted paths of the parts of a state that cannot be saved, for error messages."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def naming_unpicklable(value: Any, name: str = "") -> Iterator[None]:
    """Raise a TypeError that names the part of a value that a block could not pickle.

    Errors of other classes are unchanged. `name` is the path of the value in the state.
    """
    try:
        yield
    except (AttributeError, TypeError, pickle.PicklingError) as exc:
        found = _find_unpicklable(value, name, set())
        if found is None:
            raise
        path, part = found
        raise TypeError(
            f"{path or 'the state'!r} cannot be pickled, because it is a {type(part).__name__}: "
            f"{exc}; remove it from the state, or save a plain value instead"
        ) from exc


def find_cycle(state: Any) -> str | None:
    """Return the path of a dictionary or list that contains itself; None if there is none."""
    waiting: list[tuple[str, Any, frozenset[int]]] = [("", state, frozenset())]
    while waiting:
        path, value, above = waiting.pop()
        if isinstance(value, Mapping | list):
            if id(value) in above:
                return path
            below = above | {id(value)}
            waiting += [(*part, below) for part in _parts(value, path)]
    return None


def _find_unpicklable(value: Any, path: str, seen: set[int]) -> tuple[str, Any] | None:
    """Return the innermost part that cannot be pickled, after its path; None if all can be."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    with suppress(Exception):  # of any class, depending on the value
        _Pickler(io.BytesIO(), protocol=2).dump(value)
        return None
    found = (_find_unpicklable(part, name, seen) for name, part in _parts(value, path))
    return next(filter(None, found), (path, value))


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return the elements of a container, or the attributes of an object, after their paths."""
    if isinstance(value, list | tuple | set | frozenset):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = {} if callable(value) else getattr(value, "__dict__", {})
    return [(f"{path}.{name}".lstrip("."), part) for name, part in value.items()]


class _Pickler(pickle.Pickler):
    """Pickler that skips the data of tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return hasattr(obj, "untyped_storage") or None

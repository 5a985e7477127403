"""A state, from the flat names that DCP gives its values.

DCP names a value by its way through dictionaries and lists, and keeps the ways: text for a key, a
number for a place in a list. Lost are keys that were numbers, as those of an optimizer's state are,
and dictionaries without anything in them. Who has the state says so beside, by `tell_containers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch

__all__ = ["CONTAINERS", "nest", "tell_containers"]

CONTAINERS: Final = "containers"
"""Name of what `tell_containers` returns among the extras of a commit."""

_INTEGERS: Final = "integers"
_EMPTY: Final = "empty"

_MAX_PLACES: Final = 2**20
"""Places of a list that is built from its ways; a larger number is no place."""

_Way: TypeAlias = "tuple[str | int, ...]"


def tell_containers(state: Mapping[Any, Any]) -> str:
    """Return what the names of values do not tell of a state: as JSON, small."""
    told: dict[str, list[_Way]] = {_INTEGERS: [], _EMPTY: []}
    _look((), state, told)
    return json.dumps({kind: ways for kind, ways in told.items() if ways})


def _look(way: _Way, value: Any, told: dict[str, list[_Way]]) -> None:
    if isinstance(value, Mapping):
        if not value:
            told[_EMPTY].append(way)
        elif all(type(key) is int for key in value):
            told[_INTEGERS].append(way)
        for key, each in value.items():
            _look((*way, str(key)), each, told)
    elif isinstance(value, list) and not _is_value(value):
        for at, each in enumerate(value):
            _look((*way, at), each, told)


def _is_value(values: list[Any]) -> bool:
    """Tell whether DCP pickles a list whole: it holds no tensor, no dictionary and no such list."""
    return not any(
        isinstance(each, torch.Tensor | Mapping) or (isinstance(each, list) and not _is_value(each))
        for each in values
    )


def nest(
    values: Mapping[str, Any], ways: Mapping[str, Any] | None, containers: str = ""
) -> dict[Any, Any]:
    """Return the state that has these values.

    Args:
        values: By name.
        ways: Way of each name; one that is not in it stays at the top by its name.
        containers: What `tell_containers` told; nothing by default.

    Raises:
        ValueError: The ways contradict each other, or what is told does.
    """
    root: dict[Any, Any] = {}
    for name, value in values.items():
        way = (ways or {}).get(name, (name,))
        if not way or not _is_way(way):
            raise ValueError(f"the way of {name[:200]!r} is none")
        _put(root, way, value)
    told = _parse(containers)
    for way in told.get(_EMPTY, []):
        if way:
            _put(root, way, {})
    # The longest first: a way is one of text keys as long as its own dictionary is not renamed.
    for way in sorted(told.get(_INTEGERS, []), key=len, reverse=True):
        node = _get(root, way)
        if type(node) is not dict or not all(_is_integer(key) for key in node):
            raise ValueError("a dictionary with numbers for keys has others")
        renamed = {int(key): each for key, each in node.items()}
        node.clear()
        node.update(renamed)
    return root


def _is_integer(key: Any) -> bool:
    return type(key) is str and len(key) < 32 and key.removeprefix("-").isdecimal()


def _parse(containers: str) -> dict[str, list[_Way]]:
    if not containers:
        return {}
    told = json.loads(containers)  # its error is a ValueError
    ways: dict[str, list[_Way]] = {}
    for kind in (_INTEGERS, _EMPTY) if isinstance(told, dict) else ():
        each = told.get(kind, [])
        if not isinstance(each, list) or not all(map(_is_way, each)):
            raise ValueError("what is told of containers is no list of ways")
        ways[kind] = [tuple(way) for way in each]
    return ways


def _is_way(way: Any) -> bool:
    return isinstance(way, list | tuple) and all(type(step) in {str, int} for step in way)


def _put(root: dict[Any, Any], way: _Way, value: Any) -> None:
    node: Any = root
    for at, step in enumerate(way[:-1]):
        node = _step(node, step, [] if type(way[at + 1]) is int else {})
    last = _step(node, way[-1], _NOTHING, is_last=True)
    if last is not _NOTHING:
        raise ValueError("two values have the same way")
    node[way[-1]] = value


_NOTHING: Final = object()


def _step(node: Any, step: str | int, new: Any, *, is_last: bool = False) -> Any:
    """Return what is at one step of a way, made if there is nothing yet."""
    if type(step) is int:
        if type(node) is not list or not 0 <= step < _MAX_PLACES:
            raise ValueError("a way leads to a place in something that is no list of that length")
        node.extend([_NOTHING] * (step + 1 - len(node)))
        found = node[step]
    else:
        if type(node) is not dict:
            raise ValueError("a way leads through something that is no dictionary")
        found = node.get(step, _NOTHING)
    if found is _NOTHING and not is_last:
        node[step] = found = new
    return found


def _get(root: dict[Any, Any], way: _Way) -> Any:
    node: Any = root
    for step in way:
        is_place = type(node) is list and type(step) is int and 0 <= step < len(node)
        if not is_place and not (type(node) is dict and step in node):
            raise ValueError("a way that is told leads nowhere")
        node = node[step]
    return node

"""A state, from the flat names that DCP gives its values.

DCP names a value by its way through dictionaries and lists, and keeps the ways: text for a key, a
number for a place in a list. Lost are keys that were no text, such as the numbers in an optimizer's
state, and dictionaries without anything in them. Who has the state says so beside, by
`tell_containers`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch

__all__ = ["CONTAINERS", "nest", "tell_containers"]

CONTAINERS: Final = "containers"
"""Name of what `tell_containers` returns among the extras of a commit."""

_INTEGERS: Final = "integers"
_EMPTY: Final = "empty"
_LITERALS: Final = "literals"

_MAX_DIGITS: Final = 32
"""A longer number is told as a literal: to turn text into numbers takes its square in time."""

_MAX_PLACES: Final = 2**20
"""Places of a list that is built from its ways; a larger number is no place."""

_Way: TypeAlias = "tuple[str | int, ...]"


def tell_containers(state: Mapping[Any, Any]) -> str:
    """Return what the names of values do not tell of a state: as JSON, small.

    Raises:
        TypeError: A key is neither text nor a plain constant, so that no load could bring it back.
    """
    told: dict[str, list[Any]] = {_INTEGERS: [], _EMPTY: [], _LITERALS: []}
    _look((), state, told)
    return json.dumps({kind: ways for kind, ways in told.items() if ways})


def _look(way: _Way, value: Any, told: dict[str, list[Any]]) -> None:
    if isinstance(value, Mapping):
        if not value:
            told[_EMPTY].append(way)
        elif all(type(key) is int and _is_integer(str(key)) for key in value):
            told[_INTEGERS].append(way)
        elif odd := [key for key in value if type(key) is not str]:
            told[_LITERALS].append((way, {str(key): _literal(way, key) for key in odd}))
        for key, each in value.items():
            _look((*way, str(key)), each, told)
    elif isinstance(value, list) and not _is_value(value):
        for at, each in enumerate(value):
            _look((*way, at), each, told)


def _literal(way: _Way, key: Any) -> str:
    """Return the source text of a key that is a constant, or a tuple of some."""
    text = repr(key)
    with suppress(ValueError, SyntaxError):
        again = ast.literal_eval(text)
        if again == key and repr(again) == text:
            return text
    where = "".join(f"[{step!r}]" for step in way) or "the state"
    raise TypeError(
        f"{where} has a key of type {type(key).__name__}, which cannot be stored: {text[:100]}; "
        "use text, numbers or tuples of them"
    )


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
    names: list[tuple[_Way, dict[str, Any] | None]] = [
        *((way, None) for way in told.get(_INTEGERS, [])),
        *told.get(_LITERALS, []),
    ]
    # The longest first: a way is one of text keys as long as its own dictionary is not renamed.
    for way, keys in sorted(names, key=lambda each: len(each[0]), reverse=True):
        node = _get(root, way)
        if type(node) is not dict:
            raise ValueError("what is told to be a dictionary is none")
        if keys is None and not all(_is_integer(key) for key in node):
            raise ValueError("a dictionary with numbers for keys has others")
        renamed = {
            int(key) if keys is None else keys.get(key, key): each for key, each in node.items()
        }
        node.clear()
        node.update(renamed)
    return root


def _is_integer(key: Any) -> bool:
    return type(key) is str and len(key) < _MAX_DIGITS and key.removeprefix("-").isdecimal()


def _parse(containers: str) -> dict[str, list[Any]]:
    if not containers:
        return {}
    told = json.loads(containers)  # its error is a ValueError
    if not isinstance(told, dict):
        return {}
    ways: dict[str, list[Any]] = {}
    for kind in (_INTEGERS, _EMPTY):
        each = told.get(kind, [])
        if not isinstance(each, list) or not all(map(_is_way, each)):
            raise ValueError("what is told of containers is no list of ways")
        ways[kind] = [tuple(way) for way in each]
    ways[_LITERALS] = [*map(_parse_literals, _as_list(told.get(_LITERALS, [])))]
    return ways


def _parse_literals(told: Any) -> tuple[_Way, dict[str, Any]]:
    way, texts = (*_as_list(told), None, None)[:2]
    if not _is_way(way) or not isinstance(texts, dict):
        raise ValueError("what is told of keys is no way and texts")
    try:
        keys = {name: ast.literal_eval(text) for name, text in texts.items()}
        hash(tuple(keys.values()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError("what is told of a key is no constant") from exc
    return tuple(way), keys


def _as_list(told: Any) -> list[Any]:
    return told if isinstance(told, list) else [None]


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

"""A state, from the flat names that DCP gives its values.

DCP names a value by its way through dictionaries and lists, and keeps the ways: text for a key, a
number for a place in a list. Lost are keys that were no text, such as the numbers in an optimizer's
state, dictionaries without anything in them, and the classes of dictionaries and parameters. Who
has the state says so beside, by `tell_containers`.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CONTAINERS", "KINDS", "merge_containers", "nest", "parameter_names", "tell_containers"]

CONTAINERS: Final = "containers"
"""Name of what `tell_containers` returns among the extras of a commit."""

_INTEGERS: Final = "integers"
_EMPTY: Final = "empty"
_LITERALS: Final = "literals"
_PARAMETERS: Final = "parameters"

KINDS: Final[dict[type, str]] = {OrderedDict: "ordered", Counter: "counters"}
"""Classes of dictionaries that are restored: those that are built without running foreign code."""

_WAYS: Final = (_INTEGERS, _EMPTY, *KINDS.values())
"""What is told as a list of ways."""

_MAX_DIGITS: Final = 32
"""A longer number is told as a literal: to turn text into numbers takes its square in time."""

_MAX_PLACES: Final = 2**20
"""Places of a list that is built from its ways; a larger number is no place."""

_Way: TypeAlias = "tuple[str | int, ...]"


def tell_containers(state: Mapping[Any, Any]) -> str:
    """Return what the names of values do not tell of a state: as JSON, small.

    Raises:
        TypeError: A key is neither text nor a plain constant, so that no load could bring it back,
            or two keys of a dictionary are the same as text.
    """
    told: dict[str, list[Any]] = {kind: [] for kind in (*_WAYS, _LITERALS, _PARAMETERS)}
    _look((), state, told)
    return json.dumps({kind: ways for kind, ways in told.items() if ways})


def merge_containers(told: Iterable[str]) -> str:
    """Return what `tell_containers` returned for several parts of one state, as one."""
    texts = [*dict.fromkeys(told)]
    if len(texts) == 1:
        return texts[0]
    merged: dict[str, dict[str, Any]] = {}
    for text in texts:
        for kind, each in json.loads(text).items():
            merged.setdefault(kind, {}).update((json.dumps(one), one) for one in each)
    return json.dumps({kind: [*each.values()] for kind, each in merged.items()})


def _look(way: _Way, value: Any, told: dict[str, list[Any]]) -> None:
    if isinstance(value, torch.nn.Parameter):
        told[_PARAMETERS].append(".".join(map(str, way)))
    elif isinstance(value, Mapping):
        if kind := KINDS.get(type(value)):
            told[kind].append(way)
        if not value:
            told[_EMPTY].append(way)
        elif all(type(key) is int and _is_integer(str(key)) for key in value):
            told[_INTEGERS].append(way)
        elif odd := [key for key in value if type(key) is not str]:
            if len({str(key) for key in value}) < len(value):
                name = ".".join(map(str, way)) or "the state"
                raise TypeError(
                    f"{name!r} has keys that are the same as text, such as 0 and '0'; a checkpoint "
                    "names its values by text, so give one of them another key"
                )
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
        if way and not _is_dictionary(root, way):  # empty on one rank, and not on another
            _put(root, way, {})
    changes: list[tuple[_Way, Callable[[dict[Any, Any]], dict[Any, Any]]]] = [
        *((way, _with_numbers) for way in told.get(_INTEGERS, [])),
        *((way, partial(_renamed, keys)) for way, keys in told.get(_LITERALS, [])),
        *((way, kind) for kind, name in KINDS.items() for way in told.get(name, [])),
    ]
    # The longest first: a way is one of text keys as long as its own dictionary is not renamed.
    for way, change in sorted(changes, key=lambda each: len(each[0]), reverse=True):
        node = _get(root, way)
        if not isinstance(node, dict):
            raise ValueError("what is told to be a dictionary is none")  # noqa: TRY004  as all
        if way:
            _get(root, way[:-1])[way[-1]] = change(node)
        else:
            root = change(node)
    return root


def _with_numbers(node: dict[Any, Any]) -> dict[Any, Any]:
    return {int(key) if _is_integer(key) else key: each for key, each in node.items()}


def _renamed(keys: Mapping[str, Any], node: dict[Any, Any]) -> dict[Any, Any]:
    return {keys.get(key, key): each for key, each in node.items()}


def _is_integer(key: Any) -> bool:
    return type(key) is str and len(key) < _MAX_DIGITS and key.removeprefix("-").isdecimal()


def _parse(containers: str) -> dict[str, list[Any]]:
    if not containers:
        return {}
    told = json.loads(containers)  # its error is a ValueError
    if not isinstance(told, dict):
        return {}
    ways: dict[str, list[Any]] = {}
    for kind in _WAYS:
        each = told.get(kind, [])
        if not isinstance(each, list) or not all(map(_is_way, each)):
            raise ValueError("what is told of containers is no list of ways")
        ways[kind] = [tuple(way) for way in each]
    ways[_LITERALS] = [*map(_parse_literals, _as_list(told.get(_LITERALS, [])))]
    return ways


def parameter_names(containers: str) -> set[str]:
    """Return the names of the values that were parameters of a module.

    Raises:
        ValueError: What is told is no JSON.
    """
    told = json.loads(containers) if containers else {}
    names = told.get(_PARAMETERS, []) if isinstance(told, dict) else []
    return {name for name in _as_list(names) if type(name) is str}


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


def _is_dictionary(root: dict[Any, Any], way: _Way) -> bool:
    with suppress(ValueError):
        return type(_get(root, way)) is dict
    return False


def _get(root: dict[Any, Any], way: _Way) -> Any:
    node: Any = root
    for step in way:
        is_place = type(node) is list and type(step) is int and 0 <= step < len(node)
        if not is_place and not (type(node) is dict and step in node):
            raise ValueError("a way that is told leads nowhere")
        node = node[step]
    return node

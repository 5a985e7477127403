"""nest: a nested state, from the flat names that DCP gives its values.

DCP names a value by its path through dictionaries and lists, and stores the paths: a string for a
key, a number for an index of a list. Lost are keys that were no strings, such as the numbers in an
optimizer's state, empty dictionaries, and the classes of dictionaries and parameters. A save stores
these in the commit, by `describe_containers`.
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

__all__ = [
    "CONTAINERS",
    "KINDS",
    "describe_containers",
    "is_value",
    "merge_containers",
    "nest",
    "parameter_names",
]

CONTAINERS: Final = "containers"
"""Name of what `describe_containers` returns among the extras of a commit."""

_INTEGERS: Final = "integers"
_EMPTY: Final = "empty"
_LITERALS: Final = "literals"
_PARAMETERS: Final = "parameters"

KINDS: Final[dict[type, str]] = {OrderedDict: "ordered", Counter: "counters"}
"""Classes of dictionaries that are restored: those that are built without running foreign code."""

_PATH_LISTS: Final = (_INTEGERS, _EMPTY, *KINDS.values())
"""Descriptions that are lists of paths."""

_MAX_DIGITS: Final = 32
"""A longer number is a literal: the time to parse it grows with the square of its length."""

_MAX_PLACES: Final = 2**20
"""Longest list that is built from paths; a larger number is no index."""

_Path: TypeAlias = "tuple[str | int, ...]"


def describe_containers(state: Mapping[Any, Any]) -> str:
    """Return what the names of values lack of a state, as JSON.

    Raises:
        TypeError: A key is neither a string nor a plain constant, so that no load could restore it,
            or two keys of a dictionary are equal as strings.
    """
    described: dict[str, list[Any]] = {kind: [] for kind in (*_PATH_LISTS, _LITERALS, _PARAMETERS)}
    _describe((), state, described)
    return json.dumps({kind: paths for kind, paths in described.items() if paths})


def merge_containers(described: Iterable[str]) -> str:
    """Return what `describe_containers` returned for several parts of one state, as one."""
    texts = [*dict.fromkeys(described)]
    if len(texts) == 1:
        return texts[0]
    merged: dict[str, dict[str, Any]] = {}
    for text in texts:
        for kind, each in json.loads(text).items():
            merged.setdefault(kind, {}).update((json.dumps(one), one) for one in each)
    return json.dumps({kind: [*each.values()] for kind, each in merged.items()})


def _describe(path: _Path, value: Any, described: dict[str, list[Any]]) -> None:
    if isinstance(value, torch.nn.Parameter):
        described[_PARAMETERS].append(".".join(map(str, path)))
    elif isinstance(value, Mapping):
        if kind := KINDS.get(type(value)):
            described[kind].append(path)
        if not value:
            described[_EMPTY].append(path)
        elif all(type(key) is int and _is_integer(str(key)) for key in value):
            described[_INTEGERS].append(path)
        elif odd := [key for key in value if type(key) is not str]:
            if len({str(key) for key in value}) < len(value):
                name = ".".join(map(str, path)) or "the state"
                raise TypeError(
                    f"{name!r} has keys that are the same as text, such as 0 and '0'; a checkpoint "
                    "names its values by text, so give one of them another key"
                )
            described[_LITERALS].append((path, {str(key): _literal(path, key) for key in odd}))
        for key, each in value.items():
            _describe((*path, str(key)), each, described)
    elif isinstance(value, list) and not is_value(value):
        for at, each in enumerate(value):
            _describe((*path, at), each, described)


def _literal(path: _Path, key: Any) -> str:
    """Return the source text of a key that is a constant, or a tuple of some."""
    text = repr(key)
    with suppress(ValueError, SyntaxError):
        again = ast.literal_eval(text)
        if again == key and repr(again) == text:
            return text
    where = "".join(f"[{step!r}]" for step in path) or "the state"
    raise TypeError(
        f"{where} has a key of type {type(key).__name__}, which cannot be stored: {text[:100]}; "
        "use text, numbers or tuples of them"
    )


def is_value(values: list[Any]) -> bool:
    """Return whether DCP pickles a list whole: no tensor, dictionary or such list is in it."""
    for each in values:
        if isinstance(each, torch.Tensor | Mapping):
            return False
        if isinstance(each, list) and not is_value(each):
            return False
    return True


def nest(
    values: Mapping[str, Any], paths: Mapping[str, Any] | None, containers: str = ""
) -> dict[Any, Any]:
    """Return the state that has these values.

    Args:
        values: The values by name.
        paths: Path of each name; a name without one stays at the top.
        containers: What `describe_containers` returned; nothing by default.

    Raises:
        ValueError: The paths or the descriptions contradict each other.
    """
    root: dict[Any, Any] = {}
    for name, value in values.items():
        path = (paths or {}).get(name, (name,))
        if not path or not _is_path(path):
            raise ValueError(f"the path of {name[:200]!r} is malformed")
        _put(root, path, value)
    described = _parse(containers)
    for path in described.get(_EMPTY, []):
        if path and not _is_dictionary(root, path):  # empty on one rank, and not on another
            _put(root, path, {})
    changes: list[tuple[_Path, Callable[[dict[Any, Any]], dict[Any, Any]]]] = [
        *((path, _with_numbers) for path in described.get(_INTEGERS, [])),
        *((path, partial(_renamed, keys)) for path, keys in described.get(_LITERALS, [])),
        *((path, kind) for kind, name in KINDS.items() for path in described.get(name, [])),
    ]
    # The longest first: a path has string keys until the keys of its dictionaries are renamed.
    for path, change in sorted(changes, key=lambda each: len(each[0]), reverse=True):
        node = _get(root, path)
        if not isinstance(node, dict):
            raise ValueError("what is described as a dictionary is none")  # noqa: TRY004  as all
        if path:
            _get(root, path[:-1])[path[-1]] = change(node)
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
    described = json.loads(containers)  # its error is a ValueError
    if not isinstance(described, dict):
        return {}
    paths: dict[str, list[Any]] = {}
    for kind in _PATH_LISTS:
        each = described.get(kind, [])
        if not isinstance(each, list) or not all(map(_is_path, each)):
            raise ValueError("the description of containers is no list of paths")
        paths[kind] = [tuple(path) for path in each]
    paths[_LITERALS] = [*map(_parse_literals, _as_list(described.get(_LITERALS, [])))]
    return paths


def parameter_names(containers: str) -> set[str]:
    """Return the names of the values that were parameters of a module.

    Raises:
        ValueError: `containers` is no JSON.
    """
    described = json.loads(containers) if containers else {}
    names = described.get(_PARAMETERS, []) if isinstance(described, dict) else []
    return {name for name in _as_list(names) if type(name) is str}


def _parse_literals(described: Any) -> tuple[_Path, dict[str, Any]]:
    path, texts = (*_as_list(described), None, None)[:2]
    if not _is_path(path) or not isinstance(texts, dict):
        raise ValueError("the description of keys is no path and literals")
    try:
        keys = {name: ast.literal_eval(text) for name, text in texts.items()}
        hash(tuple(keys.values()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError("the description of a key is no constant") from exc
    return tuple(path), keys


def _as_list(described: Any) -> list[Any]:
    return described if isinstance(described, list) else [None]


def _is_path(path: Any) -> bool:
    return isinstance(path, list | tuple) and all(type(step) in {str, int} for step in path)


def _put(root: dict[Any, Any], path: _Path, value: Any) -> None:
    node: Any = root
    for at, step in enumerate(path[:-1]):
        node = _step(node, step, [] if type(path[at + 1]) is int else {})
    last = _step(node, path[-1], _MISSING, is_last=True)
    if last is not _MISSING:
        raise ValueError("two values have the same path")
    node[path[-1]] = value


_MISSING: Final = object()


def _step(node: Any, step: str | int, new: Any, *, is_last: bool = False) -> Any:
    """Return the value at one step of a path; `new` is put there if it is missing."""
    if type(step) is int:
        if type(node) is not list or not 0 <= step < _MAX_PLACES:
            raise ValueError("a path leads to a place in something that is no list of that length")
        node.extend([_MISSING] * (step + 1 - len(node)))
        found = node[step]
    else:
        if type(node) is not dict:
            raise ValueError("a path leads through something that is no dictionary")
        found = node.get(step, _MISSING)
    if found is _MISSING and not is_last:
        node[step] = found = new
    return found


def _is_dictionary(root: dict[Any, Any], path: _Path) -> bool:
    with suppress(ValueError):
        return type(_get(root, path)) is dict
    return False


def _get(root: dict[Any, Any], path: _Path) -> Any:
    node: Any = root
    for step in path:
        is_place = type(node) is list and type(step) is int and 0 <= step < len(node)
        if not is_place and not (type(node) is dict and step in node):
            raise ValueError("a described path does not exist")
        node = node[step]
    return node

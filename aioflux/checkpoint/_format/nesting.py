"""Nested states: rebuilt from the flat names that DCP stores, and the paths of their values.

DCP flattens a state: it names each value by its path through dictionaries and lists, and stores the
paths. A path consists of strings for dictionary keys and numbers for list indexes. DCP does not
store which keys were not strings (an optimizer's state has integer keys), which dictionaries were
empty and where, or the classes of dictionaries and parameters. `describe_containers` collects these
facts, and a save stores them in the commit; `nest` rebuilds the state.

`naming_unpicklable` and `find_cycle` find the path of a value that cannot be saved, for the error.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import torch

CONTAINERS: Final = "containers"
"""Key of the result of `describe_containers` in `Commit.extra`."""

_INTEGERS: Final = "integers"
_EMPTY: Final = "empty"
_LITERALS: Final = "literals"
_ORDERS: Final = "orders"
_PARAMETERS: Final = "parameters"

KINDS: Final[dict[type, str]] = {OrderedDict: "ordered", Counter: "counters"}
"""Dictionary classes that a load restores, with their names in a description. Other classes are
loaded as dict, because building them could run unknown code."""

_PATH_LISTS: Final = (_INTEGERS, _EMPTY, *KINDS.values())
"""Keys of a description whose value is a list of paths."""

_MAX_DIGITS: Final = 32
"""Integer keys have fewer digits than this. A longer key is stored as a literal: the time to parse
an integer grows with the square of its length."""

_MAX_LIST_LENGTH: Final = 2**20
"""Longest list that a load builds. A larger index is an error, so that a damaged path cannot
allocate much memory."""

_Path: TypeAlias = "tuple[str | int, ...]"


def describe_containers(state: Mapping[Any, Any]) -> str:
    """Describe the containers of a state that DCP's paths cannot restore, as JSON.

    Raises:
        TypeError: A key is not a string, a constant or a tuple of constants, so that no load could
            restore it, or two keys of a dictionary are the same when converted to strings.
    """
    kinds = (*_PATH_LISTS, _LITERALS, _ORDERS, _PARAMETERS)
    described: dict[str, list[Any]] = {kind: [] for kind in kinds}
    _describe((), state, described)
    return json.dumps({kind: paths for kind, paths in described.items() if paths})


def merge_containers(described: Iterable[str]) -> str:
    """Merge the descriptions of the containers of several ranks into one."""
    texts = [*dict.fromkeys(described)]
    if len(texts) == 1:
        return texts[0]
    merged: dict[str, dict[str, Any]] = {}
    for text in texts:
        for kind, entries in json.loads(text).items():
            merged.setdefault(kind, {}).update((json.dumps(entry), entry) for entry in entries)
    return json.dumps({kind: [*entries.values()] for kind, entries in merged.items()})


def _describe(path: _Path, value: Any, described: dict[str, list[Any]]) -> bool:
    """Add the containers in a value; return False if they are all empty dictionaries."""
    if isinstance(value, torch.nn.Parameter):
        described[_PARAMETERS].append(".".join(map(str, path)))
    elif isinstance(value, Mapping):
        if kind := KINDS.get(type(value)):
            described[kind].append(path)
        if not value:
            described[_EMPTY].append(path)
        elif all(type(key) is int and _is_integer(str(key)) for key in value):
            described[_INTEGERS].append(path)
        elif literals := [key for key in value if type(key) is not str]:
            if len({str(key) for key in value}) < len(value):
                name = ".".join(map(str, path)) or "the state"
                raise TypeError(
                    f"{name!r} has keys that are the same as text, such as 0 and '0'; a checkpoint "
                    "names its values by text, so change one of the keys"
                )
            described[_LITERALS].append((path, {str(key): _literal(path, key) for key in literals}))
        full = [_describe((*path, str(key)), child, described) for key, child in value.items()]
        if False in full and True in full[full.index(False) :]:
            # A load inserts the empty dictionaries last.
            described[_ORDERS].append((path, [*map(str, value)]))
        return any(full)
    elif isinstance(value, list) and not is_leaf_list(value):
        full = [_describe((*path, index), each, described) for index, each in enumerate(value)]
        return any(full)
    return True


def _literal(path: _Path, key: Any) -> str:
    """Return the source text of a key that is a constant or a tuple of constants."""
    text = repr(key)
    with suppress(ValueError, SyntaxError):
        parsed = ast.literal_eval(text)
        if parsed == key and repr(parsed) == text:
            return text
    where = "".join(f"[{step!r}]" for step in path) or "the state"
    raise TypeError(
        f"{where} has a key of type {type(key).__name__}, which cannot be stored: {text[:100]}; "
        "use strings, numbers or tuples of strings and numbers"
    )


def is_leaf_list(values: list[Any]) -> bool:
    """Return whether DCP pickles a list as one value: it contains no tensor and no dictionary."""
    for value in values:
        if isinstance(value, torch.Tensor | Mapping):
            return False
        if isinstance(value, list) and not is_leaf_list(value):
            return False
    return True


def nest(
    values: Mapping[str, Any], paths: Mapping[str, Any] | None, containers: str = ""
) -> dict[Any, Any]:
    """Return the nested state.

    Args:
        values: The values by name.
        paths: The path of each name. A name without a path is a key of the outermost dictionary.
        containers: Result of `describe_containers`; if empty, all containers are dict and list.

    Raises:
        ValueError: A path or `containers` is malformed, or they contradict each other.
    """
    root: dict[Any, Any] = {}
    # The paths have the order of the saved state. With several ranks, the values have another one.
    for name in dict.fromkeys((*(paths or {}), *values)):
        if name not in values:
            continue
        path = (paths or {}).get(name, (name,))
        if not path or not _is_path(path):
            raise ValueError(f"the path of {name[:200]!r} is malformed")
        _insert(root, path, values[name])
    described = _parse(containers)
    for path in described.get(_EMPTY, []):
        if path and not _is_dictionary(root, path):  # the dictionary may have keys of another rank
            _insert(root, path, {})
    changes: list[tuple[_Path, Callable[[dict[Any, Any]], dict[Any, Any]]]] = [
        *((path, partial(_with_order, keys)) for path, keys in described.get(_ORDERS, [])),
        *((path, _with_integer_keys) for path in described.get(_INTEGERS, [])),
        *((path, partial(_with_literal_keys, keys)) for path, keys in described.get(_LITERALS, [])),
        *((path, kind) for kind, name in KINDS.items() for path in described.get(name, [])),
    ]
    # Longest paths first: paths consist of string keys, so the keys of inner dictionaries must
    # change before the keys of outer ones.
    for path, change in sorted(changes, key=lambda each: len(each[0]), reverse=True):
        node = _get(root, path)
        if not isinstance(node, dict):
            raise ValueError("a value described as a dictionary is not one")  # noqa: TRY004
        if path:
            _get(root, path[:-1])[path[-1]] = change(node)
        else:
            root = change(node)
    return root


def _with_order(keys: list[str], node: dict[Any, Any]) -> dict[Any, Any]:
    return {key: node[key] for key in keys if key in node} | node


def _with_integer_keys(node: dict[Any, Any]) -> dict[Any, Any]:
    return {int(key) if _is_integer(key) else key: value for key, value in node.items()}


def _with_literal_keys(keys: Mapping[str, Any], node: dict[Any, Any]) -> dict[Any, Any]:
    return {keys.get(key, key): value for key, value in node.items()}


def _is_integer(key: Any) -> bool:
    return type(key) is str and len(key) < _MAX_DIGITS and key.removeprefix("-").isdecimal()


def _parse(containers: str) -> dict[str, list[Any]]:
    if not containers:
        return {}
    described = json.loads(containers)  # raises JSONDecodeError, which is a ValueError
    if not isinstance(described, dict):
        return {}
    paths: dict[str, list[Any]] = {}
    for kind in _PATH_LISTS:
        entries = described.get(kind, [])
        if not isinstance(entries, list) or not all(map(_is_path, entries)):
            raise ValueError(f"{kind!r} in the description of containers is not a list of paths")
        paths[kind] = [tuple(path) for path in entries]
    paths[_LITERALS] = [*map(_parse_literals, _as_list(described.get(_LITERALS, [])))]
    paths[_ORDERS] = [*map(_parse_order, _as_list(described.get(_ORDERS, [])))]
    return paths


def parameter_names(containers: str) -> set[str]:
    """Return the names of the values that were of class `torch.nn.Parameter`.

    Raises:
        ValueError: `containers` is not JSON.
    """
    described = json.loads(containers) if containers else {}
    names = described.get(_PARAMETERS, []) if isinstance(described, dict) else []
    return {name for name in _as_list(names) if type(name) is str}


def _parse_literals(described: Any) -> tuple[_Path, dict[str, Any]]:
    path, texts = (*_as_list(described), None, None)[:2]
    if not _is_path(path) or not isinstance(texts, dict):
        raise ValueError("the description of dictionary keys is not a path with literals")
    try:
        keys = {name: ast.literal_eval(text) for name, text in texts.items()}
        hash(tuple(keys.values()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError(
            "the description of dictionary keys has a text that is not a literal"
        ) from exc
    return tuple(path), keys


def _parse_order(described: Any) -> tuple[_Path, list[str]]:
    path, keys = (*_as_list(described), None, None)[:2]
    if not _is_path(path) or not isinstance(keys, list) or {str} != {*map(type, keys)}:
        raise ValueError("the description of the order of a dictionary is not a path with keys")
    return tuple(path), keys


def _as_list(described: Any) -> list[Any]:
    return described if isinstance(described, list) else [None]


def _is_path(path: Any) -> bool:
    return isinstance(path, list | tuple) and all(type(step) in {str, int} for step in path)


def _insert(root: dict[Any, Any], path: _Path, value: Any) -> None:
    """Set the value at a path, and create the containers on the path that do not exist."""
    node: Any = root
    for position, step in enumerate(path[:-1]):
        node = _child(node, step, [] if type(path[position + 1]) is int else {})
    if _child(node, path[-1], _MISSING) is not _MISSING:
        raise ValueError("two values have the same path")
    node[path[-1]] = value


_MISSING: Final = object()


def _child(node: Any, step: str | int, default: Any) -> Any:
    """Return the value of a key or index, which is set to `default` if it is missing."""
    if type(step) is int:
        if type(node) is not list or not 0 <= step < _MAX_LIST_LENGTH:
            raise ValueError("a path has an index, but no list is there or the index is too large")
        node.extend([_MISSING] * (step + 1 - len(node)))
        child = node[step]
    else:
        if type(node) is not dict:
            raise ValueError("a path has a key, but no dictionary is there")
        child = node.get(step, _MISSING)
    if child is _MISSING and default is not _MISSING:
        node[step] = child = default
    return child


def _is_dictionary(root: dict[Any, Any], path: _Path) -> bool:
    with suppress(ValueError):
        return type(_get(root, path)) is dict
    return False


def _get(root: dict[Any, Any], path: _Path) -> Any:
    node: Any = root
    for step in path:
        is_index = type(node) is list and type(step) is int and 0 <= step < len(node)
        if not is_index and not (type(node) is dict and step in node):
            raise ValueError("a path in the description of containers does not exist")
        node = node[step]
    return node


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
        _TensorlessPickler(io.BytesIO(), protocol=2).dump(value)
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


class _TensorlessPickler(pickle.Pickler):
    """Pickler that skips the data of tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return hasattr(obj, "untyped_storage") or None

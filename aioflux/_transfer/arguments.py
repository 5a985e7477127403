"""Checks of the arguments of public methods, before a request is sent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aioflux._services.base import Precondition, Source, WriteRequest
from aioflux._transfer.temp_keys import TEMPORARY_PREFIXES, is_temporary
from aioflux._values.meta import (
    ATTRIBUTE_NAMES,
    DEFAULT_ATTRIBUTES,
    ObjectAttributes,
    ObjectMeta,
)
from aioflux._values.uri import has_scheme
from aioflux.options import RetryPolicy, Timeouts, TransferOptions

if TYPE_CHECKING:
    from aioflux.options import WriteAttributes


def parse_key(key: str | ObjectMeta) -> tuple[str, ObjectMeta | None]:
    """Return the key, and its metadata if the argument is an `ObjectMeta`.

    Raises:
        TypeError: The argument is neither a string nor an `ObjectMeta`.
        ValueError: The key is empty.
    """
    if isinstance(key, ObjectMeta):
        return key.key, key
    if not isinstance(key, str):
        raise TypeError(f"a key is a string or an ObjectMeta, not {type(key).__name__}")
    if not key:
        raise ValueError("a key must not be empty")
    return key, None


def parse_source(key: str | ObjectMeta, generation: str | None = None) -> Source:
    """Return the key and the generation of an object, the current one by default.

    Raises:
        TypeError: `key` is metadata, and `generation` is given, too.
        ValueError: `generation` is empty.
    """
    name, meta = parse_key(key)
    if generation is None:
        if meta is None:
            return Source(key=name)
        return Source(key=name, generation=meta.generation, is_latest=meta.is_latest)
    if meta is not None or not isinstance(generation, str):
        raise TypeError("a generation is text, given with a name; metadata has a generation")
    if not generation:
        raise ValueError("generation must not be empty; None means the current one")
    return Source(key=name, generation=generation)


def parse_path(path: Any) -> str:
    """Return the absolute path of a local file, or raise TypeError if it is not text."""
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"a path is text or an os.PathLike of text, not {path!r:.80}")
    return os.path.abspath(name)


def parse_data(key: str, data: Any) -> memoryview:
    """Return the bytes of the data of `key`, or raise TypeError if it is not contiguous memory."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")  # no cast of a shape with a 0
    except (TypeError, ValueError, BufferError) as exc:
        raise TypeError(
            f"the data of {key!r} must be bytes, a bytearray or other C-contiguous memory, not "
            f"{type(data).__name__}: {exc}"
        ) from exc


def parse_memory(memory: Any) -> memoryview:
    """Return a view of bytes; TypeError for strided memory, ValueError for read-only memory."""
    needed = "a read needs writable memory that is C-contiguous, such as a bytearray"
    try:
        view = memoryview(memory)
        data = view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError, BufferError) as exc:
        raise TypeError(f"{needed}, not {type(memory).__name__}: {exc}") from exc
    if view.readonly:
        raise ValueError(f"{needed}; this {type(memory).__name__} is read-only")
    return data


def parse_pair(pair: Any) -> tuple[str, memoryview]:
    """Return the key and the bytes of a pair of `put_many`, or raise TypeError."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"put_many needs pairs (key, data), not {pair!r:.80}")
    key = parse_key(pair[0])[0]
    return key, parse_data(key, pair[1])


def parse_prefix(prefix: str) -> str:
    """Return the prefix, or raise TypeError if it is not a string."""
    if not isinstance(prefix, str):
        raise TypeError(f"a prefix is a string, not {type(prefix).__name__}")
    return prefix


def check_listing(delimiter: str, match_glob: str, limit: int | None = None) -> None:
    """Check the filters of a listing.

    Raises:
        TypeError: A filter is not a string.
        ValueError: Both filters are given, or the limit is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit must be 0 or more, not {limit}")
    for name, value in (("delimiter", delimiter), ("match_glob", match_glob)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a string, not {type(value).__name__}")
    if delimiter and match_glob:
        raise ValueError(
            "delimiter and match_glob exclude each other; give only match_glob, in which * matches "
            "one level and ** matches all levels"
        )


def require_many_keys(keys: object) -> None:
    """Raise TypeError for a single string, whose letters would each be used as a key."""
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"give an iterable of strings, not the string {keys!r}; put it in a list")


def check_mode(mode: str, if_generation_match: str | None) -> None:
    """Check the mode and the expected generation of a write.

    Raises:
        TypeError: The generation is not a string.
        ValueError: The mode is unknown, or two conditions exclude each other.
    """
    if mode not in {"overwrite", "create"}:
        raise ValueError(f'mode must be "overwrite" or "create", not {mode!r}')
    if if_generation_match is None:
        return
    if not isinstance(if_generation_match, str):
        raise TypeError(
            "if_generation_match is a string, such as ObjectMeta.generation, not "
            f"{if_generation_match!r}"
        )
    if not if_generation_match:
        raise ValueError(
            "if_generation_match must not be empty; if ObjectMeta.generation is empty, the service "
            "returned none, and the write cannot have this precondition"
        )
    if if_generation_match == "0":
        raise ValueError('if_generation_match="0" is not supported; use mode="create" instead')
    if mode == "create":
        raise ValueError('mode="create" and if_generation_match exclude each other')


def parse_attributes(given: WriteAttributes) -> ObjectAttributes:
    """Return the attributes of a write, with metadata names in lower case.

    Raises:
        TypeError: There is no such attribute, or a value is not a string.
        ValueError: A value cannot be a header, or two names of metadata differ only in case.
    """
    if not given:
        return DEFAULT_ATTRIBUTES
    attributes = ObjectAttributes(**given)
    for name in ATTRIBUTE_NAMES:
        value = getattr(attributes, name)
        if name == "metadata":
            _check_metadata(value)
        elif not isinstance(value, str):
            raise TypeError(f"{name} is a string, not {value!r}")
        elif value != value.strip() or not (value.isascii() and value.isprintable()):
            raise ValueError(
                f"{name} cannot be {value!r}: it is sent as a header, so use printable ASCII "
                "without space at either end"
            )
    metadata = attributes.metadata
    return replace(attributes, metadata=lower_names(metadata)) if metadata else attributes


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a mapping of strings, not {type(metadata).__name__}")
    for name, value in metadata.items():
        if not all(isinstance(text, str) for text in (name, value)):
            raise TypeError(f"metadata maps strings to strings, not {name!r} to {value!r}")


def check_offset(name: str, value: object) -> None:
    """Raise TypeError if an offset in an object is not an integer."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, not {value!r}")


def parse_expires(expires: timedelta | float, *, max_days: int) -> int:
    """Return the time for which a signed url is valid, in whole seconds, rounded up.

    Raises:
        TypeError: The time is neither a timedelta nor a number of seconds.
        ValueError: The time is not positive, or is longer than `max_days`.
    """
    if isinstance(expires, bool) or not isinstance(expires, timedelta | int | float):
        raise TypeError(f"expires is a timedelta or a number of seconds, not {expires!r}")
    seconds = expires.total_seconds() if isinstance(expires, timedelta) else expires
    if not 0 < seconds <= max_days * 86_400:
        raise ValueError(f"expires must be above 0 and at most {max_days} days, not {expires!r}")
    return math.ceil(seconds)


def check_range(start: int, end: int) -> None:
    """Check the range `[start, end)` of a read.

    Raises:
        TypeError: An offset is not an integer.
        ValueError: `start` is negative, or `end` is not above it.
    """
    check_offset("start", start)
    check_offset("end", end)
    if start < 0 or end <= start:
        reason = "end is below start" if end < start else "it is empty"
        reason = "start is negative" if start < 0 else reason
        raise ValueError(f"a range needs 0 <= start < end, not [{start}, {end}): {reason}")


def lower_names(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return metadata with its names in lower case, as services return them.

    Services receive the names as parts of HTTP headers, which are case-insensitive.

    Raises:
        ValueError: Two names differ only in case.
    """
    lowered: dict[str, str] = {}
    for name, value in metadata.items():
        if name.lower() in lowered:
            first = next(other for other in metadata if other.lower() == name.lower())
            raise ValueError(
                f"metadata cannot have both {first!r} and {name!r}: services keep names in lower "
                "case, so that both would be the same name"
            )
        lowered[name.lower()] = value
    return lowered


def check_policies(*, transfer: object, retry: object, timeouts: object) -> None:
    """Raise TypeError for settings of another class, such as a dictionary."""
    for name, value, kind in (
        ("transfer", transfer, TransferOptions),
        ("retry", retry, RetryPolicy),
        ("timeouts", timeouts, Timeouts),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be aioflux.{kind.__name__}(...), not {value!r}")


def write_request(
    key: str,
    precondition: Precondition,
    attributes: ObjectAttributes = DEFAULT_ATTRIBUTES,
) -> WriteRequest:
    """Return the request value of a write.

    Raises:
        ValueError: The key is a uri, or it has a prefix of temporary objects, which listings leave
            out.
    """
    if has_scheme(key):
        raise ValueError(
            f"{key!r} cannot be written: it is a uri, and a key is relative to the uri of the "
            "store; use the key alone"
        )
    if is_temporary(key):
        raise ValueError(
            f"{key!r} cannot be written: listings leave out keys below "
            f"{', '.join(TEMPORARY_PREFIXES)}, which are for objects of aioflux; use another key"
        )
    return WriteRequest(key, precondition, attributes)

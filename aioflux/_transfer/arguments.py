"""Checks of arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

from aioflux._values.meta import ObjectMeta
from aioflux.options import RetryPolicy, Timeouts, TransferOptions

__all__ = [
    "check_listing",
    "check_metadata",
    "check_mode",
    "check_offset",
    "check_policies",
    "lower_names",
    "parse_key",
    "parse_prefix",
    "require_many_keys",
]


def parse_key(key: str | ObjectMeta) -> tuple[str, ObjectMeta | None]:
    """Return the key, and the metadata if it was given.

    Raises:
        TypeError: It is neither a string nor metadata.
        ValueError: It is empty.
    """
    if isinstance(key, ObjectMeta):
        return key.key, key
    if not isinstance(key, str):
        raise TypeError(f"a key is a string or an ObjectMeta, not {type(key).__name__}")
    if not key:
        raise ValueError("a key must not be empty")
    return key, None


def parse_prefix(prefix: str) -> str:
    """Return the prefix, or raise TypeError if it is no string."""
    if not isinstance(prefix, str):
        raise TypeError(f"a prefix is a string, not {type(prefix).__name__}")
    return prefix


def check_listing(delimiter: str, match_glob: str) -> None:
    """Check the filters of a listing.

    Raises:
        TypeError: One is no string.
        ValueError: Both are given.
    """
    for name, value in (("delimiter", delimiter), ("match_glob", match_glob)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a string, not {type(value).__name__}")
    if delimiter and match_glob:
        raise ValueError(
            "delimiter and match_glob exclude each other; a pattern can name one level"
        )


def require_many_keys(keys: object) -> None:
    """Raise TypeError for one string, which would be read as many keys of one letter."""
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"give several keys, not the one {keys!r}; put it in a list")


def check_mode(mode: str, if_generation_match: str | None) -> None:
    """Check the condition of a write.

    Raises:
        TypeError: The generation is no string.
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
            "if_generation_match must not be empty: this service returned no generation of the "
            "object to compare"
        )
    if if_generation_match == "0":
        raise ValueError('if_generation_match="0" is written mode="create": no object may exist')
    if mode == "create":
        raise ValueError('mode="create" and if_generation_match exclude each other')


def check_metadata(content_type: str, metadata: Mapping[str, str] | None) -> None:
    """Raise TypeError if the content type or the metadata of an object are no strings."""
    if not isinstance(content_type, str):
        raise TypeError(f"content_type is a string, not {content_type!r}")
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata maps strings to strings, it is no {type(metadata).__name__}")
    for name, value in metadata.items():
        if not all(isinstance(each, str) for each in (name, value)):
            raise TypeError(f"metadata maps strings to strings, not {name!r} to {value!r}")


def check_offset(name: str, value: object) -> None:
    """Raise TypeError if an offset in an object is no integer."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, not {value!r}")


def lower_names(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return metadata with its names in lower case, as services return them.

    They are sent as names of headers, which have no case.

    Raises:
        ValueError: Two names differ in case only.
    """
    lowered: dict[str, str] = {}
    for name, value in metadata.items():
        if name.lower() in lowered:
            first = next(each for each in metadata if each.lower() == name.lower())
            raise ValueError(
                f"metadata cannot have both {first!r} and {name!r}: services keep names in lower "
                "case, so that they would be one"
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

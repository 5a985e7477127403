"""Guards of what callers pass: a mistake is named where it is made, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

from aioflux._values.meta import ObjectMeta
from aioflux.options import RetryPolicy, Timeouts, TransferOptions

__all__ = [
    "check_listing",
    "check_metadata",
    "check_mode",
    "check_policies",
    "check_position",
    "lower_names",
    "parse_key",
    "parse_prefix",
    "refuse_one_key",
]


def parse_key(key: str | ObjectMeta) -> tuple[str, ObjectMeta | None]:
    """Return the name, and the metadata where that was given.

    Raises:
        TypeError: It is neither.
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
    """Return the prefix.

    Raises:
        TypeError: It is no string.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"a prefix is a string, not {type(prefix).__name__}")
    return prefix


def check_listing(delimiter: str, match_glob: str) -> None:
    """Check what a listing is narrowed by.

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


def refuse_one_key(keys: object) -> None:
    """Refuse one string, which would be taken for the keys that its letters name.

    Raises:
        TypeError: It is one.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"give several keys, not the one {keys!r}; put it in a list")


def check_mode(mode: str, if_generation_match: str | None) -> None:
    """Check the condition of a write.

    Raises:
        TypeError: The generation is no string.
        ValueError: There is no such mode, or two conditions exclude each other.
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
            "if_generation_match must not be empty: this service gave the object no generation to "
            "compare with"
        )
    if if_generation_match == "0":
        raise ValueError('if_generation_match="0" is said by mode="create": no object may be there')
    if mode == "create":
        raise ValueError('mode="create" and if_generation_match exclude each other')


def check_metadata(content_type: str, metadata: Mapping[str, str] | None) -> None:
    """Check what an object is labelled with.

    Raises:
        TypeError: Something of it is no string.
    """
    if not isinstance(content_type, str):
        raise TypeError(f"content_type is a string, not {content_type!r}")
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata maps strings to strings, it is no {type(metadata).__name__}")
    for name, value in metadata.items():
        if not all(isinstance(each, str) for each in (name, value)):
            raise TypeError(f"metadata maps strings to strings, not {name!r} to {value!r}")


def check_position(name: str, value: object) -> None:
    """Check a place in an object, in bytes.

    Raises:
        TypeError: It is no integer.
    """
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, not {value!r}")


def lower_names(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return metadata with its names in lower case.

    Names travel as names of headers, which have no case: services return them in lower case.

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
    """Refuse settings of another class, such as a dictionary.

    Raises:
        TypeError: One is of another class.
    """
    for name, value, kind in (
        ("transfer", transfer, TransferOptions),
        ("retry", retry, RetryPolicy),
        ("timeouts", timeouts, Timeouts),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be aioflux.{kind.__name__}(...), not {value!r}")

"""Matches of a scenario on another cloud: its server, and the peers that support it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perf.access import KINDS, SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perf.scenarios._scenario import Match, Side

__all__ = ["check_scheme", "in_scheme", "speaks"]

_EVERY = ("gs", "s3", "az")
_SPEAKERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("aioflux", "aioflux_checkpoint", "aioflux_data", "aioflux_dcp"),
            *("aioflux_lines", "aioflux_nebula", "aioflux_torch", "obstore", "obstore_torch"),
        ),
        _EVERY,
    ),
    **dict.fromkeys(("disk_dcp", "memory_copy", "memory_data"), _EVERY),
    **dict.fromkeys(
        (
            *("aiobotocore", "boto3", "s3fs", "s3fs_lines"),
            *(
                "s3torchconnector",
                "s3torchconnector_checkpoint",
                "s3torchconnector_data",
                "s3torchconnector_dcp",
            ),
        ),
        ("s3",),
    ),
    "azure_blob": ("az",),
}
"""Schemes that a contender supports; contenders that are not listed support only `gs`."""


def check_scheme(scheme: str) -> None:
    """Check that a scheme exists.

    Raises:
        ValueError: The scheme is unknown.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"must be one of {', '.join(SCHEMES)}, not {scheme!r}")


def speaks(peer: str, scheme: str) -> bool:
    """Return whether a contender supports a scheme."""
    return scheme in _SPEAKERS.get(peer, ("gs",))


def in_scheme(matches: Iterable[Match], scheme: str) -> tuple[Match, ...]:
    """Return the matches whose contenders both support a scheme, on the server of the scheme."""
    return tuple(
        replace(match, ours=_moved(match.ours, scheme), theirs=_moved(match.theirs, scheme))
        for match in matches
        if speaks(match.ours.work.peer, scheme) and speaks(match.theirs.work.peer, scheme)
    )


def _moved(side: Side, scheme: str) -> Side:
    if scheme == "gs":
        return side
    kind: Any = KINDS[scheme]
    return replace(
        side, work=replace(side.work, scheme=scheme), server=replace(side.server, kind=kind)
    )

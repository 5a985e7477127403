"""Base class of scenarios: parameters, matches against rivals, and goals of aioflux."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Self

    from perf.servers import ServerSpec

__all__ = [
    "KIB",
    "MIB",
    "OURS",
    "Match",
    "Promise",
    "Rival",
    "Scenario",
    "Side",
    "matches_against",
    "ready_objects",
]

KIB = 1024
MIB = 1024 * KIB
SHARES = {
    "gcloud_aio": 0.3,
    "gcsfs": 0.1,
    "google": 0.06,
    "obstore": 0.5,
    "obstore_crc32c": 0.5,
    "transfer_manager": 0.03,
}
"""Objects that a slower peer moves, as a share of the objects that aioflux moves. The samples of
both then take about the same time."""
MAX_IN_FLIGHT = 100_000
"""Largest value of `in_flight`: each request needs a task and a connection."""
_FIXED = {"name", "rivals", "operation", "case", "ours"}
"""Fields that the command line cannot replace."""
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A peer that aioflux is compared with, and the goal."""

    peer: str
    """Module below `perf.peers`."""
    at_least: float | None = None
    """Goal: the rate of aioflux divided by the rate of the peer; None without a goal."""
    cpu_at_most: float | None = None
    """Goal: the CPU time of aioflux for an object divided by that of the peer; None without."""
    memory_at_most: float | None = None
    """Goal: the peak of resident memory of aioflux divided by that of the peer; None without."""
    share: float | None = None
    """Share of our objects that the peer moves; None is the share in `SHARES`, or 1."""
    in_flight: int | None = None
    """Requests in flight of the peer; None is the number of the scenario."""
    ours: str = ""
    """Peer of aioflux that it is compared with; empty is that of the scenario."""

    def num_objects(self, ours: int) -> int:
        """Return the number of objects that the peer moves if aioflux moves `ours`."""
        share = SHARES.get(self.peer, 1.0) if self.share is None else self.share
        return max(1, round(ours * share))


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a match: the work of a contender, and its server."""

    work: Work
    """The work; url, CA file and process ids are set when the server has started."""
    server: ServerSpec


@dataclass(frozen=True, kw_only=True)
class Match:
    """Two contenders that run alternately, and the goal of aioflux."""

    case: str = ""
    """Case of the scenario; empty if it has only one."""
    ours: Side
    theirs: Side
    label: str = ""
    """Label of the other side; empty is the name of its peer."""
    at_least: float | None = None
    """Goal of the ratio; None without a goal."""
    cpu_at_most: float | None = None
    """Goal of the ratio of the CPU times of an object; None without a goal."""
    memory_at_most: float | None = None
    """Goal of the ratio of the peaks of resident memory; None without a goal."""
    cap_per_second: float = math.inf
    """Objects per second that no client can exceed here. The ratio is our rate divided by the lower
    one of this cap and the rate of the other side."""

    @property
    def name(self) -> str:
        """Label of the other side."""
        return self.label or self.theirs.work.peer


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A goal of aioflux that does not depend on a peer."""

    figure: Literal["requests", "waiting", "ms", "memory"]
    """`requests`: maximum number of requests that the server received in a sample. `waiting`:
    median share of the time in which the consumer waited. `ms`: median of the milliseconds for an
    object. `memory`: maximum of the resident bytes above those before the measured part."""
    at_most: float
    """Maximum, inclusive."""


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """Parameters of one scenario. `--set` replaces its fields by name."""

    is_by_name_only: ClassVar[bool] = False
    """Whether the scenario runs only if the command line names it, because it takes long."""
    is_in_bytes: ClassVar[bool] = False
    """Whether rates are shown in bytes."""
    max_pairs: ClassVar[float] = math.inf
    """Maximum number of pairs; fewer are enough for samples of many seconds."""
    min_limit_seconds: ClassVar[float] = 0.0
    """Minimum of the time limit of a sample, for samples of many seconds."""
    name: str
    """Name on the command line."""
    rivals: tuple[Rival, ...] = ()
    """Peers that aioflux is compared with."""

    @abstractmethod
    def matches(self) -> tuple[Match, ...]:
        """Return the matches of all cases and rivals."""

    @abstractmethod
    def toy(self) -> Self:
        """Return the scenario at a size that runs in about a second."""

    @property
    def displayed_bytes(self) -> int:
        """Size of an object, if rates are shown in bytes; 0 if they are shown in objects."""
        size_bytes: int = getattr(self, "size_bytes", 0)
        return size_bytes if self.is_in_bytes else 0

    def promises(self) -> tuple[Promise, ...]:
        """Return the goals of aioflux alone."""
        return ()

    def scaled(self, factor: float) -> Self:
        """Return the scenario with `factor` times the objects, if it has several."""
        count = getattr(self, "num_objects", None)
        if count is None:
            return self
        return self.replaced({"num_objects": str(max(1, round(count * factor)))})

    def against(self, peers: tuple[str, ...]) -> Self:
        """Return the scenario with only these peers; peers that are no rivals get no goal."""
        known = {rival.peer: rival for rival in self.rivals}
        others = (peer for peer in peers if peer in known or not peer.startswith("aioflux"))
        return replace(self, rivals=tuple(known.get(peer, Rival(peer=peer)) for peer in others))

    def parameters_in_words(self) -> str:
        """Return the fields that `--set` can replace, with their values."""
        return ", ".join(f"{name}={_typed(name, getattr(self, name))}" for name in self._settable())

    def _settable(self) -> list[str]:
        return [field.name for field in fields(self) if field.name not in _FIXED]

    def replaced(self, settings: Mapping[str, str]) -> Self:
        """Return the scenario with fields replaced by the values of a command line.

        Raises:
            ValueError: A field does not exist, or its value is invalid.
        """
        types = get_type_hints(type(self))
        known = self._settable()
        changes: dict[str, Any] = {}
        for name, text in settings.items():
            if name not in known:
                raise ValueError(f"{self.name} has no {name!r}; it has {', '.join(known)}")
            try:
                changes[name] = _parsed(text, types[name])
                if name == "in_flight" and changes[name] > MAX_IN_FLIGHT:
                    raise ValueError(f"must be at most {MAX_IN_FLIGHT:,}, is {text}")  # noqa: TRY301
            except ValueError as exc:
                raise ValueError(f"{name} of {self.name}: {exc}") from exc
        return replace(self, **changes)


OURS = Rival(peer="aioflux")
"""aioflux, through its asynchronous store."""


def matches_against(
    rivals: Iterable[Rival], side: Callable[[Rival], Side], *, ours: Rival = OURS, case: str = ""
) -> tuple[Match, ...]:
    """Return a match against each rival.

    Args:
        rivals: The rivals.
        side: Returns the work and the server of a contender.
        ours: The interface of aioflux that is compared.
        case: Case of the scenario.
    """
    return tuple(
        Match(
            case=case,
            ours=side(replace(ours, peer=rival.ours or ours.peer)),
            theirs=side(rival),
            at_least=rival.at_least,
            cpu_at_most=rival.cpu_at_most,
            memory_at_most=rival.memory_at_most,
        )
        for rival in rivals
    )


def ready_objects(work: Work) -> tuple[tuple[int, int], ...]:
    """Return the objects that reads need on the server, with those before the measured part."""
    first = work.opening()
    wanted = {first.size_bytes: first.num_keys, work.size_bytes: work.num_keys}
    if work.size_bytes > WARM_UP_BYTES:
        wanted.setdefault(WARM_UP_BYTES, 1)
    return tuple(wanted.items())


def _typed(name: str, value: Any) -> str:
    """Return a value in the form that `--set` accepts."""
    if name.endswith("_bytes"):
        for unit, size in reversed(_UNITS.items()):
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parsed(text: str, kind: Any) -> Any:
    """Parse a value of the command line.

    Raises:
        ValueError: The text is no value of this type. Integers must be at least 1, floats 0.
    """
    if kind is bool:
        if text.lower() not in {"true", "false"}:
            raise ValueError(f"must be true or false, not {text!r}")
        return text.lower() == "true"
    if kind is str:
        return text
    return _whole(text) if kind is int else _fraction(text)


def _whole(text: str) -> int:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        number = int(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        raise ValueError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise ValueError(f"must be at least 1, is {text!r}")
    return number


def _fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {text!r}") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"must be finite and not negative, is {text!r}")
    return number

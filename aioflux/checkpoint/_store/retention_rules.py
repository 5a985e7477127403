"""Retention rules: which steps are kept and which are removed. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StepInfo

Best: TypeAlias = tuple[str, str] | tuple[str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rules for keeping steps. A step is kept if any rule keeps it; without rules, all are kept.

    The newest valid step and all newer steps are always kept. A rule that is not set is None.
    """

    keep_last: int | None = None
    """Keep this number of the newest valid steps."""
    keep_every: int | None = None
    """Keep every step that is a multiple of this number."""
    keep_best: Best | None = None
    """Keep the step with the lowest metric, by `(metric, "min")`, or the highest, by
    `(metric, "max")`. A third value N keeps the N best. Of equal steps the newest is kept; steps
    without the metric are ignored."""
    ttl_seconds: float | None = None
    """Keep every step that was committed less than this number of seconds ago."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}")
        if self.ttl_seconds is not None and not self.ttl_seconds > 0:
            raise ValueError(f"ttl_seconds must be above 0, not {self.ttl_seconds!r}")
        if self.keep_best is not None:
            _check_best(self.keep_best)

    @property
    def has_rules(self) -> bool:
        """Return whether at least one rule is set."""
        return any(getattr(self, rule.name) is not None for rule in fields(self))


def _check_best(best: object) -> None:
    match best:
        case (str(), "min" | "max"):
            return
        case (str(), "min" | "max", int(count)) if count >= 1:
            return
        case _:
            pass
    raise ValueError(
        'keep_best must be (metric, "min") or (metric, "max"), or with a count of 1 or more as '
        f"third value, not {best!r}"
    )


def plan_prune(
    steps: Iterable[StepInfo],
    retention: Retention,
    *,
    now: float,
    protected: Collection[int] = (),
) -> list[int]:
    """Return the steps to remove, in ascending order.

    A step with a `problem` is invalid. Without a valid step, all steps are kept. Steps newer than
    the newest valid step are kept, so that someone can find out why they failed verification. An
    invalid step that is older is kept only by `keep_every`, `ttl_seconds` or `protected`.

    Args:
        steps: All committed steps.
        retention: The rules.
        now: The current time, in seconds since 1970, UTC.
        protected: Steps to keep in any case, such as the step that was loaded.
    """
    records = sorted(steps, key=lambda record: record.step)
    valid = [record for record in records if not record.problem]
    if not retention.has_rules or not valid:
        return []
    kept = {record.step for record in records if record.step >= valid[-1].step}
    kept.update(protected)
    if retention.keep_last is not None:
        kept.update(record.step for record in valid[-retention.keep_last :])
    if retention.keep_every is not None:
        kept.update(record.step for record in records if record.step % retention.keep_every == 0)
    if retention.ttl_seconds is not None:
        ttl = retention.ttl_seconds
        kept.update(record.step for record in records if now - record.created < ttl)
    if retention.keep_best is not None:
        kept.update(_best(valid, retention.keep_best))
    return [record.step for record in records if record.step not in kept]


def steps_to_verify(steps: Iterable[StepInfo], retention: Retention) -> set[int]:
    """Return the steps to verify before a removal: others are removed because these are valid."""
    valid = sorted(
        (record for record in steps if not record.problem), key=lambda record: record.step
    )
    unverified = {record.step for record in valid[-(retention.keep_last or 1) :]}
    if retention.keep_best is not None:
        unverified.update(_best(valid, retention.keep_best))
    return unverified


def _best(valid: Sequence[StepInfo], best: Best) -> list[int]:
    """Return the steps with the best metric. Steps without the metric are ignored."""
    metric, mode, *count = best
    sign = 1.0 if mode == "max" else -1.0
    ranked = sorted(
        (
            (sign * record.metrics[metric], record.step)
            for record in valid
            if not math.isnan(record.metrics.get(metric, math.nan))
        ),
        reverse=True,
    )
    return [step for _, step in ranked[: count[0] if count else 1]]

"""prune: the removal of the steps that no rule keeps, commit object first.

    committed steps -> plan_prune (retention_rules) -> remove_step, oldest first

A step without its commit object does not exist for any reader: a removal that is interrupted leaves
objects that no commit names, which `clean` finds, and never a step that cannot be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aioflux.checkpoint._format.commit import step_prefix
from aioflux.checkpoint._maintain.orphans import save_of
from aioflux.checkpoint._maintain.retention_rules import StepRecord, plan_prune, steps_to_verify
from aioflux.checkpoint._maintain.verify import verify_steps
from aioflux.checkpoint._store.commits import read_commits, summarize, uri_below
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aioflux._values.meta import DeleteResult, ObjectMeta
    from aioflux.checkpoint._maintain.retention_rules import Retention
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.errors import AiofluxError
    from aioflux.store import Store

__all__ = ["Pruned", "prune", "remove_step"]


async def remove_step(store: Store, step: int, generation: str) -> DeleteResult:
    """Remove a step of this generation: its commit object, then what this and older saves wrote.

    All are deleted in the generation that was read. Keys that no save makes stay, and so do objects
    of a newer save of the step. A damaged commit object is deleted alone: what it names is unknown,
    and `clean` finds it.

    Returns:
        The keys that were deleted, and the errors of those that stay as garbage.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CheckpointCorruptError: Another program wrote the commit object.
        PreconditionFailedError: It was saved again or removed meanwhile.
    """
    prefix = step_prefix(step)
    found = await _read_removable(store, step)
    newest = found[-1].commit
    made = await _list_saved(store, prefix, newest.save_id if newest else "")
    removed = []
    for at, each in enumerate(found):
        is_last = at == len(found) - 1
        # Without a generation, that of a damaged commit object, it is the one that was read here.
        pin = generation if generation and is_last else each.meta.generation
        meta = replace(each.meta, generation=pin)
        try:
            await store.delete(meta)
        except NotFoundError as exc:
            raise PreconditionFailedError(
                f"{meta.uri} was removed or saved again meanwhile", uri=meta.uri
            ) from exc
        removed.append(meta.key)
    result = await store.delete_many(made)
    return replace(result, deleted=(*removed, *result.deleted))


async def _read_removable(store: Store, step: int) -> list[CommitObject]:
    """Return the commit objects of a step; of two layouts the newer last.

    The older one may lack objects by now: it must not be seen without the newer.
    """
    found = await read_commits(store, step_prefix(step))
    for each in found:
        if each.commit is None and each.problem is None:
            raise CheckpointCorruptError(
                f"{each.meta.uri} stays: something else than aioflux wrote it; remove it with "
                "`aioflux rm -r` if it is of no use"
            )
    if not found:
        raise CheckpointNotFoundError(
            f"there is no step {step} in {store.uri} to remove: it has no commit object"
        )
    return found


async def _list_saved(store: Store, prefix: str, newest: str) -> list[ObjectMeta]:
    """Return the objects that saves of a step wrote, up to the newest save that is removed."""
    if not newest:
        return []
    return [
        meta
        for meta in await store.list_all(prefix)
        if (save := save_of(meta.key)) is not None and save[0] == prefix and save[1] <= newest
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of a `prune`; of a dry run, what it would do."""

    removed: tuple[int, ...]
    """Steps that were removed, ascending."""
    kept: tuple[int, ...]
    """Steps that stay, ascending."""
    errors: Mapping[str, AiofluxError] = field(default_factory=dict)
    """Uris of steps that could not be removed, and of objects of removed steps that could not be
    deleted, with the reason."""


async def prune(
    store: Store,
    retention: Retention,
    *,
    now: float,
    protected: Collection[int] = (),
    dry_run: bool = False,
) -> Pruned:
    """Remove the steps that no rule keeps, oldest first, each in the generation that was read.

    The steps that the rules rely on are verified first, not deep: as many as `keep_last`, the best
    and the newest. Steps that another program wrote stay.
    """
    known = {each.step: each for each in await summarize(store) if each.is_ours}
    records = {
        step: StepRecord(
            step=step, created=each.created, metrics=each.metrics, is_valid=not each.problem
        )
        for step, each in known.items()
    }
    verified: set[int] = set()
    while plan := plan_prune(records.values(), retention, now=now, protected=protected):
        unverified = steps_to_verify(records.values(), retention) - verified
        if not unverified:
            break
        results = {
            each.step: each.is_valid for each in await verify_steps(store, sorted(unverified))
        }
        for step in unverified:
            records[step] = replace(records[step], is_valid=results.get(step, False))
        verified |= unverified
    errors: dict[str, AiofluxError] = {}
    removed = []
    for step in plan:
        try:
            if not dry_run:
                result = await remove_step(store, step, known[step].generation)
                errors |= {uri_below(store, key): exc for key, exc in result.errors.items()}
        except (CheckpointCorruptError, StorageError) as exc:
            errors[known[step].uri] = exc
        except CheckpointNotFoundError:
            continue  # it was removed meanwhile
        else:
            removed.append(step)
    kept = tuple(step for step in known if step not in removed)
    return Pruned(removed=tuple(removed), kept=kept, errors=errors)

"""prune: removal of the steps that no retention rule keeps.

    committed steps -> plan_prune (retention_rules) -> remove_step, oldest first

The commit object of a step is deleted first. So an interrupted removal never leaves a step that
cannot be loaded. It leaves data objects that no commit lists, and `clean` deletes them later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from aioflux.checkpoint._format.commit import step_prefix
from aioflux.checkpoint._store.orphans import save_of
from aioflux.checkpoint._store.retention_rules import plan_prune, steps_to_verify
from aioflux.checkpoint._store.steps import describe_steps, read_commits, uri_below
from aioflux.checkpoint._store.verify import verify_steps
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from aioflux._values.meta import DeleteResult, ObjectMeta
    from aioflux.checkpoint._store.retention_rules import Retention
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.errors import AiofluxError
    from aioflux.store import Store


async def remove_step(store: Store, step: int, generation: str) -> DeleteResult:
    """Remove a step: its commit object, then the data objects of its newest and older saves.

    An object is deleted only if it still has the generation that was read. Objects that no save
    wrote are kept, and so are objects of a newer save of the step. The data objects of a damaged
    commit object are unknown, so the commit object is deleted alone, and `clean` deletes the
    orphans.

    Args:
        store: The store of the steps.
        step: The step to remove.
        generation: Generation of the commit object; if empty, the current generation is removed.

    Returns:
        The keys that were deleted, and the errors of the objects that could not be deleted.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CheckpointCorruptError: Another program wrote the commit object.
        PreconditionFailedError: The step was saved again, or removed by another process.
    """
    prefix = step_prefix(step)
    commits = await _read_removable(store, step)
    newest = commits[-1].commit
    data_objects = await _list_saved(store, prefix, newest.save_id if newest else "")
    removed = []
    for existing in commits:
        # `generation` belongs to the newest commit object. `prune` passes an empty one if a commit
        # object of the step is damaged.
        pin = generation if generation and existing is commits[-1] else existing.meta.generation
        meta = replace(existing.meta, generation=pin)
        try:
            await store.delete(meta)
        except NotFoundError as exc:
            why = "it was removed or saved again by another process"
            raise PreconditionFailedError.of("remove", meta.uri, why) from exc
        removed.append(meta.key)
    result = await store.delete_many(data_objects)
    return replace(result, deleted=(*removed, *result.deleted))


async def _read_removable(store: Store, step: int) -> list[CommitObject]:
    """Return the commit objects of a step, one or two (DCP's layout and safetensors), newest last.

    The newest must be deleted last: without it, a load would use the older commit, whose data
    objects may already be deleted.
    """
    commits = await read_commits(store, step_prefix(step))
    for existing in commits:
        if existing.commit is None and existing.problem is None:
            raise CheckpointCorruptError(
                f"{existing.meta.uri} is not removed: a program other than aioflux wrote it; "
                "remove it with `aioflux rm -r` if it is of no use"
            )
    if not commits:
        raise CheckpointNotFoundError(
            f"there is no step {step} in {store.uri} to remove: it has no commit object"
        )
    return commits


async def _list_saved(store: Store, prefix: str, newest: str) -> list[ObjectMeta]:
    """Return the data objects of a step, of the save with the id `newest` and of older saves."""
    if not newest:
        return []
    return [
        meta
        for meta in await store.list_all(prefix)
        if (save := save_of(meta.key)) is not None and save[0] == prefix and save[1] <= newest
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of a `prune`. For a dry run, the result that a prune would have."""

    removed: tuple[int, ...]
    """Steps that were removed, in ascending order."""
    kept: tuple[int, ...]
    """Steps that were kept, in ascending order."""
    errors: Mapping[str, AiofluxError] = field(default_factory=dict)
    """Errors by uri: of steps that could not be removed, and of objects of removed steps that could
    not be deleted."""


async def prune(
    store: Store,
    retention: Retention,
    *,
    now: float,
    protected: Collection[int] = (),
    dry_run: bool = False,
) -> Pruned:
    """Remove the steps that no rule keeps, oldest first.

    The newest, the `keep_last` newest and the best steps are verified before others are removed. If
    one of them is invalid, the rules keep other steps instead. The verification does not read data
    objects. A step is removed only if its commit object still has the generation that was read.
    Steps that another program wrote, and `protected` steps, are kept. `now` is the time in seconds
    since 1970, UTC.
    """
    records = {each.step: each for each in await describe_steps(store) if each.is_ours}
    verified: set[int] = set()
    while plan := plan_prune(records.values(), retention, now=now, protected=protected):
        unverified = steps_to_verify(records.values(), retention) - verified
        if not unverified:
            break
        results = await verify_steps(store, sorted(unverified))
        valid = {result.step for result in results if result.is_valid}
        for step in unverified:
            if step not in valid:
                records[step] = structs.replace(records[step], problem="verification failed")
        verified |= unverified
    errors: dict[str, AiofluxError] = {}
    removed = []
    for step in plan:
        try:
            if not dry_run:
                result = await remove_step(store, step, records[step].generation)
                errors |= {uri_below(store, key): exc for key, exc in result.errors.items()}
        except (CheckpointCorruptError, StorageError) as exc:
            errors[records[step].uri] = exc
        except CheckpointNotFoundError:
            continue  # another process removed it
        else:
            removed.append(step)
    kept = tuple(step for step in records if step not in removed)
    return Pruned(removed=tuple(removed), kept=kept, errors=errors)

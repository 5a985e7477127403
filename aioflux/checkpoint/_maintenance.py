"""verify, copy and clean: checkpoints by uri, for blocking callers. They need no PyTorch."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

from aioflux import _bridge
from aioflux._values.uri import REMOTE_SCHEMES, parse_uri, split_at_bucket
from aioflux.checkpoint._maintain import copy as _copy
from aioflux.checkpoint._maintain import orphans as _orphans
from aioflux.checkpoint._maintain import verify as _verify
from aioflux.checkpoint._maintain.copy import CheckpointLocation
from aioflux.checkpoint._store.commits import as_prefix, read_commits
from aioflux.checkpoint._store.objects import open_checkpoint
from aioflux.errors import CheckpointNotFoundError
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import Unpack

    from aioflux._values.meta import CleanResult
    from aioflux.checkpoint._maintain.copy import Copied
    from aioflux.checkpoint._maintain.verify import Verification
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["clean", "copy", "verify"]

_ONLY_REMOTE: Final[tuple[Literal["credentials", "endpoint_url", "ssl_context"], ...]] = (
    "credentials",
    "endpoint_url",
    "ssl_context",
)


def verify(uri: str, *, deep: bool = False, **options: Unpack[StoreOptions]) -> Verification:
    """Check that a checkpoint is complete: `Verification.is_valid`, or its problems.

    Costs the commit object and one listing; deep, also every byte, with a bounded part of them in
    memory.

    Args:
        uri: Uri of one checkpoint, such as `gs://bucket/run-7/step-00000100`.
        deep: Read all bytes, and compare the crc32c of every block.
        options: As `aioflux.open_store`.

    Raises:
        StorageError: A request failed; the checkpoint may be complete.
    """

    async def work() -> Verification:
        async with open_checkpoint(uri, **options) as store:
            return await _verify.verify(store, "", deep=deep)

    return _bridge.run(work())


def copy(
    source: str,
    target: str,
    *,
    steps: Sequence[int] | None = None,
    overwrite: bool = False,
    **options: Unpack[StoreOptions],
) -> list[Copied]:
    """Copy a checkpoint, or all below a root; each appears whole or not at all.

    Within a bucket the service copies, between schemes all bytes come through here, verified.
    Objects that are there already are not copied twice, and a copy that was interrupted continues.

    Args:
        source: Uri of one checkpoint, or of a root with steps below.
        target: Uri of the copy, or of the root of the copies.
        steps: Only these steps of a root; all by default.
        overwrite: Replace other checkpoints that are there.
        options: As `aioflux.open_store`; `credentials`, `endpoint_url` and `ssl_context` are used
            for uris of buckets only, if there is one.

    Raises:
        CheckpointNotFoundError: There is nothing to copy.
        CheckpointError: A checkpoint does not verify, or another is there; later steps are copied
            all the same, and notes on the error name others that could not be.
        ValueError: Source and target are the same, or `source` is one checkpoint and `steps` are
            given.
    """

    async def work() -> list[Copied]:
        async with _open_locations([source, target], options) as opened:
            if await read_commits(opened[0].store, opened[0].prefix):
                if steps is not None:
                    raise ValueError(f"{source} is one checkpoint; steps are those of a root")
                return [await _copy.copy_checkpoint(*opened, overwrite=overwrite)]
            copied, errors = await _copy.copy_root(*opened, steps=steps, overwrite=overwrite)
        if errors:
            first, *others = errors.values()
            for other in others:
                first.add_note(f"neither could another step be copied: {other}")
            raise first
        if not copied:
            raise CheckpointNotFoundError(f"there is no checkpoint at {source}")
        return copied

    return _bridge.run(work())


@asynccontextmanager
async def _open_locations(
    uris: Sequence[str], options: StoreOptions
) -> AsyncIterator[list[CheckpointLocation]]:
    """Open the locations of uris; those in one bucket share a store, which copies by itself."""
    locations = [parse_uri(uri) for uri in uris]
    has_bucket = any(location.scheme in REMOTE_SCHEMES for location in locations)
    stores: dict[str, Store] = {}
    opened = []
    async with AsyncExitStack() as stack:
        for location in locations:
            is_disk = location.scheme == "file"
            root = str(location) if is_disk else split_at_bucket(location)[0]
            if root not in stores:
                mine = options.copy()
                if has_bucket and location.scheme not in REMOTE_SCHEMES:
                    for name in _ONLY_REMOTE:
                        mine.pop(name, None)
                stores[root] = await stack.enter_async_context(open_checkpoint(root, **mine))
            opened.append(
                CheckpointLocation(stores[root], "" if is_disk else as_prefix(location.key))
            )
        yield opened


def clean(
    uri: str,
    *,
    older_than_seconds: float = 86_400.0,
    dry_run: bool = False,
    **options: Unpack[StoreOptions],
) -> CleanResult:
    """Delete leftovers of dead processes below a uri: those of `Store.clean`, and killed saves.

    A killed save leaves objects that no commit object names. Only its age distinguishes a dead save
    from a slow one: that of its youngest object. Lists all below the uri, twice.

    Args:
        uri: Bucket, prefix or directory.
        older_than_seconds: Only objects and uploads at least so old; one day by default.
        dry_run: Only return what would be deleted.
        options: As `aioflux.open_store`.

    Returns:
        The keys that were deleted. Objects of a checkpoint whose commit object is damaged stay, and
        it is among the errors.

    Raises:
        ValueError: `older_than_seconds` is negative.
    """

    async def work() -> CleanResult:
        async with open_store(uri, **options) as store:
            return await _orphans.clean_store(
                store, older_than_seconds=older_than_seconds, dry_run=dry_run
            )

    return _bridge.run(work())

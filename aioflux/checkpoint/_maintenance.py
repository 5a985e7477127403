"""verify, copy and clean: blocking functions on checkpoint uris, which need no PyTorch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal, Unpack

from aioflux import _bridge
from aioflux._values.uri import REMOTE_SCHEMES, parse_uri, split_at_bucket
from aioflux.checkpoint._store import copy as _copy
from aioflux.checkpoint._store import orphans as _orphans
from aioflux.checkpoint._store import verify as _verify
from aioflux.checkpoint._store.copy import CheckpointLocation
from aioflux.checkpoint._store.steps import as_prefix, read_commits
from aioflux.errors import CheckpointNotFoundError
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux._values.meta import CleanResult
    from aioflux.checkpoint._store.copy import Copied
    from aioflux.checkpoint._store.verify import Verification
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_ONLY_REMOTE: Final[tuple[Literal["credentials", "endpoint_url", "ssl_context"], ...]] = (
    "credentials",
    "endpoint_url",
    "ssl_context",
)


def verify(uri: str, *, deep: bool = False, **options: Unpack[StoreOptions]) -> Verification:
    """Check that a checkpoint is complete, and return its problems.

    Reads the commit object and lists the data objects once. With `deep` all bytes are read, too, of
    which a bounded part is in memory at a time.

    Args:
        uri: Uri of one checkpoint, such as `gs://bucket/run-7/step-00000100`.
        deep: Read all bytes, and compare the crc32c of every block.
        options: As for `aioflux.open_store`.

    Raises:
        StorageError: A request failed, so that the result is unknown.
    """

    async def work() -> Verification:
        async with open_store(uri, **options) as store:
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
    """Copy one checkpoint, or all checkpoints below a prefix.

    A checkpoint becomes visible at the target when all its objects are copied. Within a bucket the
    service copies the objects. Otherwise this process reads, verifies and writes all bytes. Objects
    that exist at the target are not copied again: repeat an interrupted copy to continue it.

    Args:
        source: Uri of one checkpoint, or of the prefix that contains the steps of a run.
        target: Uri of the copy of one checkpoint, or of the prefix for the copies of the steps.
        steps: Copy only these steps; all by default.
        overwrite: Replace a different checkpoint at the target.
        options: As for `aioflux.open_store`. If one uri is in a bucket and the other is not,
            `credentials`, `endpoint_url` and `ssl_context` are used for the bucket only.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `source`.
        CheckpointError: A checkpoint failed verification, or the target has a different checkpoint.
            The other steps are copied nevertheless. The first failure is raised, with a note for
            each other failure.
        ValueError: Source and target are the same, or `source` is one checkpoint and `steps` are
            given.
    """

    async def work() -> list[Copied]:
        async with _open_locations([source, target], options) as opened:
            if await read_commits(opened[0].store, opened[0].prefix):
                if steps is not None:
                    raise ValueError(
                        f"{source} is one checkpoint, and has no steps to select; leave steps out"
                    )
                return [await _copy.copy_checkpoint(*opened, overwrite=overwrite)]
            copied, errors = await _copy.copy_root(*opened, steps=steps, overwrite=overwrite)
        if errors:
            first, *others = errors.values()
            for other in others:
                first.add_note(f"another step could not be copied: {other}")
            raise first
        if not copied:
            raise CheckpointNotFoundError(f"there is no checkpoint at {source}")
        return copied

    return _bridge.run(work())


@asynccontextmanager
async def _open_locations(
    uris: Sequence[str], options: StoreOptions
) -> AsyncIterator[list[CheckpointLocation]]:
    """Open the location of each uri.

    Locations in one bucket share one store, so that `Store.copy` can copy between them.
    """
    parsed_uris = [parse_uri(uri) for uri in uris]
    has_bucket = any(parsed.scheme in REMOTE_SCHEMES for parsed in parsed_uris)
    stores: dict[str, Store] = {}
    opened = []
    async with AsyncExitStack() as stack:
        for parsed in parsed_uris:
            is_disk = parsed.scheme == "file"
            root = str(parsed) if is_disk else split_at_bucket(parsed)[0]
            if root not in stores:
                root_options = options.copy()
                if has_bucket and parsed.scheme not in REMOTE_SCHEMES:
                    for name in _ONLY_REMOTE:
                        root_options.pop(name, None)
                store = open_store(root, **root_options)
                stores[root] = await stack.enter_async_context(store)
            opened.append(
                CheckpointLocation(stores[root], "" if is_disk else as_prefix(parsed.key))
            )
        yield opened


def clean(
    uri: str,
    *,
    older_than_seconds: float = 86_400.0,
    dry_run: bool = False,
    **options: Unpack[StoreOptions],
) -> CleanResult:
    """Delete the objects of killed saves below a uri, and the leftovers that `Store.clean` deletes.

    A killed save leaves data objects that no commit object lists. A slow save looks the same until
    its commit: only the age of its youngest object distinguishes the two. Lists all objects below
    the uri twice.

    Args:
        uri: Bucket, prefix or directory.
        older_than_seconds: Minimum age of the objects and uploads to delete; one day by default.
        dry_run: Delete nothing, and return the keys that would be deleted.
        options: As for `aioflux.open_store`.

    Returns:
        The keys that were deleted, and errors. A checkpoint whose commit object is damaged is among
        the errors, and none of its objects is deleted.

    Raises:
        ValueError: `older_than_seconds` is negative.
    """

    async def work() -> CleanResult:
        async with open_store(uri, **options) as store:
            return await _orphans.clean_store(
                store, older_than_seconds=older_than_seconds, dry_run=dry_run
            )

    return _bridge.run(work())

"""Moving: bytes of whole objects, between memory, local files and places on the service."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from glob import has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from fsspec.callbacks import DEFAULT_CALLBACK  # type: ignore[import-untyped]
from fsspec.utils import isfilelike  # type: ignore[import-untyped]

from aioflux.errors import AiofluxError, NotFoundError, PreconditionFailedError
from aioflux.integrations.fsspec import _local_files
from aioflux.integrations.fsspec._blocking import wait_for
from aioflux.integrations.fsspec._info import Looking
from aioflux.integrations.fsspec._paths import plan_slice
from aioflux.integrations.fsspec._write_file import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.integrations.fsspec._local_files import Callback
    from aioflux.integrations.fsspec._paths import Place
    from aioflux.store import Store, WriteMode

    Wanted = dict[Place, str | ObjectMeta]

__all__ = ["Moving"]

Slice: TypeAlias = tuple[int | None, int | None]

_MAX_READS = 6
"""Reads of an object that is replaced between the request for its size and that for its bytes."""

_PAUSE_SECONDS = 0.01
"""Longest pause before the second of them; it doubles with each, to 0.6 s together."""

_MAX_OBJECTS = 128
"""Objects of which `cat_ranges` reads ranges at once; requests have the bounds of the store."""

_NO_END = 1 << 62
"""An end beyond that of any object."""


class Moving(Looking):
    """The methods of an `AiofluxFileSystem` that move and delete whole objects."""

    async def _cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Read an object, or the bytes `[start, end)` of it, as of a slice."""
        place = self.object_place(path)
        store = self.store(place)
        if not start and end is None:
            return await store.get(place.key)
        first = start or 0
        if first >= 0 and end is not None and end >= 0:
            if end <= first:
                return b""
            return await store.get_range(place.key, start=first, end=end)
        found: list[bytes] = await self._read_slices(store, place.key, [(start, end)], None)
        return found[0]

    async def _cat_ranges(
        self,
        paths: Any,
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Read the bytes `[start, end)` of several objects, as of slices, in the order asked.

        Ranges of one object are of one generation, and near ones are read together: see
        `Store.get_ranges`.

        Args:
            paths: The objects; one may be there several times.
            starts: First byte of each, or one for all; None for 0.
            ends: End of each, or one for all; None for the end of the object.
            max_gap: Bytes between two ranges that are read and dropped to save a request.
            batch_size: Objects under way at once, at most.
            on_error: "return" an exception in place of the bytes, or "raise" the first.
            kwargs: Without effect.
        """
        if not isinstance(paths, list):
            raise TypeError(f"cat_ranges takes a list of paths, not {type(paths).__name__}")
        firsts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        behinds = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(paths) == len(firsts) == len(behinds):
            raise ValueError(
                f"cat_ranges was given {len(paths)} paths, {len(firsts)} starts and "
                f"{len(behinds)} ends"
            )
        groups: dict[str, list[int]] = {}
        for number, path in enumerate(paths):
            groups.setdefault(self._strip_protocol(path), []).append(number)
        gate = asyncio.Semaphore(batch_size or self.batch_size or _MAX_OBJECTS)
        found: list[Any] = [b""] * len(paths)

        async def read(path: str, numbers: list[int]) -> None:
            slices = [(firsts[number], behinds[number]) for number in numbers]
            results: list[Any]
            try:
                async with gate:
                    results = await self._slices_of(path, slices, max_gap)
            except (OSError, AiofluxError, ValueError, TypeError) as exc:
                results = [exc] * len(numbers)
            for number, result in zip(numbers, results, strict=True):
                found[number] = result

        async with asyncio.TaskGroup() as group:
            for path, numbers in groups.items():
                group.create_task(read(path, numbers))
        if on_error != "return":
            for result in found:
                if isinstance(result, Exception):
                    raise result
        return found

    async def _slices_of(
        self, path: str, slices: Sequence[Slice], max_gap: int | None
    ) -> list[bytes]:
        place = self.object_place(path)
        store = self.store(place)
        if all(not start and end is None for start, end in slices):
            return [await store.get(place.key)] * len(slices)
        return await self._read_slices(store, place.key, slices, max_gap)

    async def _read_slices(
        self, store: Store, key: str, slices: Sequence[Slice], max_gap: int | None
    ) -> list[bytes]:
        """Read slices of one generation of an object."""
        gap: dict[str, int] = {} if max_gap is None else {"max_gap_bytes": max_gap}

        async def read(wanted: str | ObjectMeta, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            asked = [each for each in ranges if each[1] > each[0]]
            data = iter(await store.get_ranges(wanted, asked, **gap))
            return [next(data) if end > start else b"" for start, end in ranges]

        if all((start or 0) >= 0 and (end is None or end >= 0) for start, end in slices):
            return await read(
                key, [(start or 0, _NO_END if end is None else end) for start, end in slices]
            )
        for number in range(_MAX_READS):
            meta = await store.head(key)
            try:
                return await read(meta, [plan_slice(*each, meta.size) for each in slices])
            except NotFoundError:  # replaced since, or deleted: the next `head` raises then
                await asyncio.sleep(random.uniform(0, _PAUSE_SECONDS * 2**number))  # noqa: S311
        raise PreconditionFailedError(
            f"could not read {meta.uri}: it was replaced while it was read, {_MAX_READS} times in "
            "a row",
            uri=meta.uri,
        )

    async def _cat(
        self,
        path: Any,
        recursive: bool = False,
        on_error: str = "raise",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read objects: the bytes of one, or a dictionary of those that several paths mean.

        Objects of one bucket are fetched as `Store.get_many` does.
        """
        wanted = self.as_list(path)
        if recursive:
            names = set()
            for each in wanted:
                for name in await self._glob(each) if has_magic(each) else [each]:
                    names.update(await self._find(name))
            expanded = sorted(names)
            if not expanded:
                raise _missing(self.unstrip_protocol(wanted[0]))
        else:
            expanded = await self._expand_path(path)
        if not isinstance(path, (list, tuple, set)) and expanded == wanted:
            return await self._cat_file(expanded[0], **kwargs)
        if kwargs:
            return await super()._cat(expanded, on_error=on_error, batch_size=batch_size, **kwargs)
        return await self._cat_many(expanded, on_error)

    async def _cat_many(self, paths: list[str], on_error: str) -> dict[str, Any]:
        groups: dict[str, list[Place]] = {}
        for path in paths:
            place = self.object_place(path)
            groups.setdefault(place.store, []).append(place)
        found: dict[str, Any] = {}
        for places in groups.values():
            keys = [place.key for place in places]
            batches = self.store(places[0]).try_fetch_batches(keys)
            results = [outcome async for batch in batches for outcome in batch]
            for place, (meta, data) in zip(places, results, strict=True):
                if meta is not None or on_error == "return":
                    found[place.path] = data
                elif on_error == "raise":
                    assert isinstance(data, Exception)
                    raise data
        return {path: found[path] for path in paths if path in found}

    async def _head(self, path: Any, size: int = 1024) -> bytes:
        """Read the first bytes of an object."""
        return await self._cat_file(path, 0, size)

    async def _tail(self, path: Any, size: int = 1024) -> bytes:
        """Read the last bytes of an object."""
        return await self._cat_file(path, -size) if size else b""

    def _at_end(self, write: Callable[[], Coroutine[Any, Any, object]]) -> Deferred:
        """Put a write off until the transaction ends."""
        deferred = Deferred(lambda: wait_for(self, write))
        self.transaction.files.append(deferred)
        return deferred

    async def _pipe_file(
        self,
        path: Any,
        value: bytes | bytearray | memoryview,
        mode: WriteMode = "overwrite",
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object, whole; in a transaction, at the end of it.

        Raises:
            AlreadyExistsError: `mode="create"`, and there is such an object.
        """
        place = self.object_place(path)

        async def write() -> None:
            await self.store(place).put(
                place.key, value, mode=mode, content_type=content_type, metadata=metadata
            )

        if self._intrans:
            self._at_end(write)
        else:
            await write()

    async def _put_file(
        self,
        lpath: Any,
        rpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        mode: WriteMode = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Write a local file as an object, whole; in a transaction, at the end of it.

        A directory is nothing that could be written.
        """
        source = Path(lpath)
        if await asyncio.to_thread(source.is_dir):
            return
        place = self.object_place(rpath)

        async def write() -> None:
            await _local_files.put_file(
                self.store(place),
                place.key,
                source,
                mode=mode,
                callback=callback,
                gates=self._gates,
            )

        if self._intrans:
            self._at_end(write)
        else:
            await write()

    async def _get_file(
        self,
        rpath: Any,
        lpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: IO[bytes] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write an object to a local file, which appears whole, or to one that is open.

        Of a directory only the local one is made.
        """
        place = self.place(rpath)
        target: Path | IO[bytes] = Path(".")
        if outfile is not None or isfilelike(lpath):
            target = outfile if outfile is not None else lpath
        else:
            target = Path(os.fspath(lpath))
        try:
            meta = await self.store(place).head(place.key) if place.key else None
        except NotFoundError:
            if not await self._has_entries(place):
                raise
            meta = None
        if meta is not None:
            if isinstance(target, Path):
                target.parent.mkdir(parents=True, exist_ok=True)
            await _local_files.get_file(
                self.store(place), meta, target, callback=callback, gates=self._gates
            )
        elif isinstance(target, Path):
            target.mkdir(parents=True, exist_ok=True)

    async def _cp_file(
        self, path1: Any, path2: Any, copied: Wanted | None = None, **kwargs: Any
    ) -> None:
        """Copy an object, on the service where both are in one bucket.

        There is nothing to copy of a directory: it is where the objects below it are.

        Args:
            path1: The object.
            path2: The name of the copy.
            copied: Takes what was copied, in the generation that it had.
            kwargs: Without effect.
        """
        source, target = self.place(path1), self.object_place(path2)
        if not source.key:
            return
        store = self.store(source)
        try:
            meta = await store.head(source.key)
        except NotFoundError:
            if await self._has_entries(source):
                return
            raise
        if source.store == target.store:
            await store.copy(meta, target.key)
        else:
            await _local_files.copy_across(
                store, meta, self.store(target), target.key, gates=self._gates
            )
        if copied is not None:
            copied[source] = meta

    async def _mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Copy an object, and delete it in the generation that was copied."""
        copied: Wanted = {}
        await self._cp_file(path1, path2, copied=copied)
        if not copied:
            raise IsADirectoryError(f"{path1!r} is a directory; move it with recursive=True")
        await self._delete(copied)

    async def _mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy objects, and delete them in the generations that were copied.

        What was written or replaced meanwhile stays where it is.
        """
        if path1 == path2:
            return
        copied: Wanted = {}
        await self._copy(
            path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", copied=copied
        )
        await self._delete(copied)

    async def _rm_file(self, path: Any, **kwargs: Any) -> None:
        """Delete an object."""
        place = self.object_place(path)
        try:
            await self.store(place).delete(place.key)
        except NotFoundError:
            if await self._has_entries(place):
                raise IsADirectoryError(
                    f"{path!r} is a directory; remove what is below it with recursive=True"
                ) from None
            raise

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Delete objects, and with `recursive` those below directories, many at once.

        Raises:
            NotFoundError: A path means nothing; nothing is deleted then.
            StorageError: Some could not be deleted: the first of them, with a note of how many.
        """
        doomed: Wanted = {}
        for each in self.as_list(path):
            names = await self._glob(each) if has_magic(each) else [each]
            if not names:
                raise _missing(self.unstrip_protocol(each))
            for name in names:
                doomed |= await self._doomed(name, recursive=recursive, maxdepth=maxdepth)
        await self._delete(doomed)

    async def _doomed(self, path: str, *, recursive: bool, maxdepth: int | None) -> Wanted:
        """Return what the removal of a path deletes, in the generations of now."""
        place = self.place(path)
        store = self.store(place)
        found: Wanted = {}
        if place.key:
            try:
                found[place] = await store.head(place.key)
            except NotFoundError:
                if not recursive and await self._has_entries(place):
                    raise IsADirectoryError(
                        f"{path!r} is a directory; remove what is below it with recursive=True"
                    ) from None
                if not recursive:
                    raise
        if recursive:
            deepest = None if maxdepth is None else path.count("/") + maxdepth
            for meta in await store.list_all(place.prefix):
                name = place.base + meta.key
                if deepest is None or name.rstrip("/").count("/") <= deepest:
                    found[place._replace(key=meta.key)] = meta
        if not found and place.key:
            raise _missing(self.unstrip_protocol(path))
        return found

    async def _delete(self, doomed: Wanted) -> None:
        groups: dict[str, list[Place]] = {}
        for place in doomed:
            groups.setdefault(place.store, []).append(place)
        for places in groups.values():
            result = await self.store(places[0]).delete_many([doomed[each] for each in places])
            if result.errors:
                error = next(iter(result.errors.values()))
                error.add_note(f"{len(result.errors)} of {len(places)} objects were not deleted")
                raise error


def _missing(uri: str) -> NotFoundError:
    return NotFoundError(f"there is nothing at {uri}; list its prefix to see what exists", uri=uri)

"""Looking: what there is. One request for a page of a listing, and one for an object."""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aioflux.errors import NotFoundError, PermissionDeniedError
from aioflux.integrations.fsspec._paths import (
    Tree,
    directory,
    entry,
    level,
    tree_of,
    within_depth,
)
from aioflux.integrations.fsspec._stores import Stores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime

    from aioflux.integrations.fsspec._paths import Entry, Place

__all__ = ["Looking"]


class Looking(Stores):
    """The methods of an `AiofluxFileSystem` that only look."""

    async def _info(self, path: Any, **kwargs: Any) -> Entry:
        """Describe the object of this name, or the directory where there is no such object.

        Raises:
            NotFoundError: There is neither.
        """
        name = self._strip_protocol(path)
        if not name:
            return directory(name)
        place = self.place(name)
        if not place.key:
            await self._has_entries(place)  # raises where there is no such bucket
            return directory(name)
        try:
            return entry(place.base, await self.store(place).head(place.key))
        except NotFoundError:
            if await self._has_entries(place):
                return directory(name)
            raise

    async def _has_entries(self, place: Place) -> bool:
        """Tell whether anything is below a place."""
        return bool(await self._first_name(place, place.prefix))

    async def _first_name(self, place: Place, prefix: str) -> str:
        """Return the first of the keys and directories that begin with a prefix; "" if none do."""
        pages = self.store(place).list_pages(prefix, delimiter="/", page_size=1)
        async with aclosing(pages) as inner:
            async for page in inner:
                first: str = min([*page.keys, *page.prefixes])
                return first
        return ""

    async def _ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List one level of a directory, or the object of this name, sorted.

        Raises:
            NotFoundError: There is neither.
        """
        place = self.place(path)
        store = self.store(place)
        listing = await store.list_all(place.prefix, delimiter="/")
        found = level(place.base, listing)
        if not (listing or listing.prefixes) and place.key:
            found = [entry(place.base, await store.head(place.key))]
        return found if detail else [each["name"] for each in found]

    async def _exists(self, path: Any, **kwargs: Any) -> bool:
        """Tell whether there is an object or a directory of this name.

        Raises:
            StorageError: The service could not be asked, or refused to say.
        """
        try:
            await self._info(path)
        except FileNotFoundError:
            return False
        return True

    async def _isfile(self, path: Any) -> bool:
        """Return whether there is an object of this name; costs one request."""
        name = self._strip_protocol(path)
        place = self.place(name) if name else None
        if place is None or not place.key:
            return False
        try:
            await self.store(place).head(place.key)
        except NotFoundError:
            return False
        return True

    async def _isdir(self, path: Any) -> bool:
        """Return whether `info` describes a directory; costs one request, at times two.

        Of the names that begin with the path, that of the object itself is listed first. Other
        objects may come before the directory, such as `a-b` before `a/`: only then a second request
        is needed.
        """
        name = self._strip_protocol(path)
        place = self.place(name) if name else None
        if place is None:
            return True
        try:
            if not place.key:
                await self._has_entries(place)  # raises if there is no such bucket
                return True
            if self.scheme == "file":
                # A name on a disk is of one kind, and its neighbours may be many.
                return await self._has_entries(place)
            first = await self._first_name(place, place.key)
            if not first or first == place.key:
                return False
            return first.startswith(place.prefix) or await self._has_entries(place)
        except NotFoundError:
            return False
        except PermissionDeniedError:
            # A caller who may read the object but list nothing still learns that it is none.
            if place.key and await self._isfile(name):
                return False
            raise

    async def _tree(self, path: str, prefix: str, maxdepth: int | None) -> Tree:
        """Return what is below a path, from one listing."""
        place = self.place(path)
        wanted = place.prefix + prefix
        if maxdepth != 1:
            listing = await self.store(place).list_all(wanted)
            return tree_of(path, place.base, listing)
        entries = level(place.base, await self.store(place).list_all(wanted, delimiter="/"))
        kinds = {
            kind: {each["name"]: each for each in entries if each["type"] == kind}
            for kind in ("directory", "file")
        }
        if entries:
            kinds["directory"][path] = directory(path)
        return Tree(kinds["directory"], kinds["file"])

    async def _find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """List all objects below a path, sorted, from one listing; none where there are none.

        Args:
            path: A directory; an object is found itself.
            maxdepth: Levels to look at.
            withdirs: List directories, too, and that of the path.
            detail: Return a dictionary of what `info` returns.
            prefix: What names below the path begin with.
            kwargs: Without effect.
        """
        name = self._strip_protocol(path)
        tree = await self._tree(name, prefix, maxdepth)
        found = dict(tree.objects)
        if withdirs:
            directories = dict(tree.directories)
            if prefix:
                directories.pop(name, None)
            found = {**directories, **found}
        if not found and not prefix and (place := self.place(name)).key:
            try:
                found = {name: entry(place.base, await self.store(place).head(place.key))}
            except NotFoundError:
                found = {}
        names = within_depth(name, found, maxdepth)
        return {each: found[each] for each in names} if detail else names

    async def _walk(
        self,
        path: Any,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = "omit",
        detail: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Yield `(path, directories, objects)` of a directory and of those below, as `os.walk`.

        All of it is listed at once; what the caller takes out of the directories is not entered.
        """
        name = self._strip_protocol(path)
        within_depth(name, (), maxdepth)  # refuses what is no depth
        try:
            tree = await self._tree(name, "", maxdepth)
            if not tree.directories and self.place(name).key:
                found = await self._info(name)
                is_object = found["type"] == "file"
                tree = Tree({name: directory(name)}, {f"{name}/": found} if is_object else {})
        except OSError as exc:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(exc)
            tree = Tree({}, {})
        below: dict[str, tuple[Entry, Entry]] = {name: ({}, {})}
        for each in sorted(tree.directories):
            below.setdefault(each, ({}, {}))
        for kind, entries in enumerate((tree.directories, tree.objects)):
            for each in sorted(entries):
                parent, _, last = each.rpartition("/")
                if each != name:
                    below[parent or self.root_marker][kind][last] = entries[each]
        for step in _steps(below, name, maxdepth, topdown, detail):
            yield step

    async def _du(
        self,
        path: Any,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the bytes of all objects below a path, or a dictionary of them by name."""
        found = await self._find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True)
        sizes = {name: each["size"] for name, each in found.items()}
        return sum(sizes.values()) if total else sizes

    async def _modified(self, path: Any) -> datetime:
        """Return when an object was last changed; of a directory, the newest below it, in UTC.

        Raises:
            NotFoundError: There is neither.
        """
        found = await self._info(path)
        entries = [found]
        if found["type"] == "directory":
            entries = list((await self._find(path, detail=True)).values())
        times = [each["mtime"] for each in entries if each["mtime"] is not None]
        if not times:
            raise NotFoundError(f"nothing below {path!r} has a time", uri=str(path))
        newest: datetime = max(times)
        return newest

    async def _created(self, path: Any) -> datetime:
        """Return what `modified` does: an object is never changed, only replaced."""
        return await self._modified(path)

    async def _checksum(self, path: Any) -> int:
        """Return a number that changes with the object: with each generation, where there are."""
        return int(await self._ukey(path), 16)

    async def _ukey(self, path: Any) -> str:
        """Return a text that changes with the object: with each generation, where there are."""
        found = await self._info(path)
        facts = [found.get(fact) for fact in ("name", "size", "generation", "etag", "crc32c")]
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _steps(
    below: dict[str, tuple[Entry, Entry]],
    path: str,
    maxdepth: int | None,
    topdown: bool,
    detail: bool,
) -> Any:
    directories, objects = below[path]
    names: Any = directories if detail else list(directories)
    step = path, names, objects if detail else list(objects)
    if topdown:
        yield step
    if maxdepth is None or maxdepth > 1:
        for each in list(names):
            if each in directories:
                deeper = None if maxdepth is None else maxdepth - 1
                yield from _steps(below, directories[each]["name"], deeper, topdown, detail)
    if not topdown:
        yield step

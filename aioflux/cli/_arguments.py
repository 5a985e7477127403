"""Arguments of the commands: uris and paths, patterns, and `--include` and `--exclude`.

    gs://bucket/a/*.txt -> literal name? -> listing below gs://bucket/a/ -> one argument per match

The syntax of patterns is that of `match_glob` of `Store.list`. A name that exists literally is
taken before what it matches as a pattern, so that no other object is read or deleted by mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._local_files import is_temporary
from aioflux._values.glob import compile_glob, literal_prefix
from aioflux._values.uri import Location, join_uri, parse_uri, split_at_bucket, suggest_uri
from aioflux.cli._event_loop import resources, run
from aioflux.cli._output import Report
from aioflux.cli._settings import ENDPOINT_URL, settings
from aioflux.cli._text import format_count, one_line
from aioflux.errors import NotFoundError, StorageError
from aioflux.options import ANONYMOUS, RetryPolicy, TransferOptions

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store


Objects = Annotated[
    list[str], typer.Argument(metavar="URI...", help="Objects, or patterns such as gs://b/*.txt.")
]
Prefixes = Annotated[
    list[str], typer.Argument(metavar="URI...", help="Prefix, bucket, object, directory, pattern.")
]
Human = Annotated[bool, typer.Option("-h", "--human-readable", help="Sizes such as 1.5 GiB.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line; its fields are above.")
]

Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only names that match, or are in a directory that does; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="No names that match, or are in a directory that does; repeatable."
    ),
]

_SERVICES = {
    "az": "aioflux._services.azure.service",
    "gs": "aioflux._services.gcs.service",
    "s3": "aioflux._services.s3.service",
}
"""Module of the service for each scheme, imported before the event loop starts."""

_MISTYPED = re.compile(r"(az|file|gs|s3):/[^/]")
"""A uri with one slash too few."""
PATTERN = re.compile(r"[*?[{]")
"""The first special character of a pattern."""

LIST_BELOW = "use aioflux ls -r to list them"
"""Advice of commands that take no prefixes."""

_MAX_COUNTED = 1000
"""Most objects that the message for a prefix counts; more take a second request."""


@dataclass(frozen=True, slots=True)
class UriOrPath:
    """One parsed argument."""

    text: str
    """The argument as given."""
    location: Location
    """The parsed uri. For a path, the scheme is `file` and the key is the absolute path."""
    meta: ObjectMeta | None = None
    """Metadata of the object, if a pattern found it."""

    @property
    def is_local(self) -> bool:
        """Return whether the argument is a local path or a `file://` uri."""
        return self.location.scheme == "file"

    @property
    def path(self) -> str:
        """The local path, relative if the argument is relative."""
        return self.location.key if "://" in self.text else self.text

    def is_directory(self) -> bool:
        """Return whether the argument is a bucket, or ends in `/`, or is a local directory."""
        key = self.location.key
        if self.is_local:
            return self.path.endswith("/") or os.path.isdir(self.path)
        return not key or key.endswith("/")

    def is_file(self) -> bool:
        return self.is_local and os.path.isfile(self.path)

    def is_link(self) -> bool:
        return self.is_local and os.path.islink(self.path)

    def may_be_object(self) -> bool:
        """Return whether an object can have this name; the key of an object may end in `/`."""
        return not self.is_directory() if self.is_local else bool(self.location.key)

    def require_object(self, command: str) -> None:
        """Check that an object can have this name.

        Raises:
            ValueError: The argument is a bucket or a directory.
        """
        if not self.may_be_object():
            raise ValueError(f"{self.text} is a bucket or directory; {command} takes objects")

    def is_missing(self) -> bool:
        """Return whether the argument names a local directory that does not exist."""
        return self.is_local and self.is_directory() and not os.path.isdir(self.path)

    def hint(self, default: str = "check the spelling") -> str:
        """Return what was probably meant if nothing has this name; `default` if that is unknown."""
        if "://" not in self.text and (meant := suggest_uri(self.text)).startswith("gs:"):
            return f"did you mean {one_line(meant)}?"
        if PATTERN.search(self.text):
            return "patterns are not expanded here; use --include, or a command that takes them"
        return default

    async def explain_missing(self, store: Store, key: str, advice: str) -> str:
        """Return why no object has this name; empty if that is unknown. Requests a listing.

        Args:
            store: The store that `open` yielded.
            key: The key in it.
            advice: How to address all objects below a prefix.
        """
        uri = one_line(join_uri(store.uri, key))
        num_objects, is_more = 0, False
        if not self.is_local:
            try:
                pages = store.list_pages(as_prefix(key), page_size=_MAX_COUNTED)
                async with aclosing(pages):
                    async for page in pages:
                        if is_more := num_objects > 0:
                            break
                        num_objects = len(page)
            except NotFoundError as exc:
                return exc.message  # there is no bucket
            except StorageError:
                return ""  # listing may be denied
        if num_objects:
            count = format_count(num_objects, "object") + (" or more" if is_more else "")
            verb = "is" if num_objects == 1 else "are"
            return f"{uri} is not an object; {count} {verb} below it: {advice}"
        hint = self.hint("")
        return hint and f"there is no object {uri}; {hint}"

    def split(self, *, follow: bool = False) -> tuple[str, str]:
        """Return the uri of the store to open, and the key or prefix in it.

        The store of an object is its bucket. The store of a local directory is the directory, and
        that of a local file is the parent directory.

        Args:
            follow: If the path is a symbolic link, return store and key of its target.
        """
        if not self.is_local:
            return split_at_bucket(self.location)
        path = self.location.key
        if follow and self.is_link():
            path = os.path.realpath(path)
        if self.is_directory():
            return str(Location("file", "", path)), ""
        parent, name = os.path.split(path)
        return str(Location("file", "", parent)), name

    def open(self, *, follow: bool = False) -> tuple[Store, str]:
        """Open the store that `split` returns, and return the store and the key or prefix."""
        root, key = self.split(follow=follow)
        return self.open_root(root), key

    @asynccontextmanager
    async def open_object(
        self, advice: str, *, follow: bool = False
    ) -> AsyncIterator[tuple[Store, str | ObjectMeta]]:
        """Open as `open`, with the metadata instead of the key if a pattern found the object.

        A NotFoundError of the body is explained; see `explain_missing`.
        """
        store, key = self.open(follow=follow)
        try:
            yield store, self.meta or key
        except NotFoundError as exc:
            if text := await self.explain_missing(store, key, advice):
                raise NotFoundError(text, uri=exc.uri) from exc
            raise

    def open_root(self, root: str) -> Store:
        """Return the store `root`, which is opened once, and closed at the end of the command."""
        from aioflux.store import open_store

        opened = resources.get()
        if (store := opened.stores.get(root)) is None:
            store = opened.stores[root] = open_store(root, **self.store_options())
            opened.push_async_exit(store)
        return store

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of `open_store` that the options of the command set."""
        options: dict[str, Any] = {}
        if self.location.scheme in _SERVICES:
            options = {
                "retry": RetryPolicy(connect_deadline_seconds=settings.connect_deadline),
                "endpoint_url": endpoint_url() or None,
                "credentials": ANONYMOUS if settings.anonymous else None,
            }
        if settings.max_in_flight:
            options["transfer"] = TransferOptions(max_in_flight=settings.max_in_flight)
        return options


def endpoint_url() -> str:
    """Return the endpoint of the option or its variable; empty if neither is given."""
    return settings.endpoint_url or os.environ.get(ENDPOINT_URL, "")


def _parse_location(text: str) -> Location:
    if not text:
        raise ValueError("a uri or path must not be empty")
    if "://" in text:
        return parse_uri(text)
    if _MISTYPED.match(text) and not os.path.lexists(text):
        scheme, _, rest = text.partition(":/")
        raise ValueError(f"there is no file {text!r}; did you mean {scheme}://{rest}?")
    # Not normalized: after a symbolic link, `..` is the parent of the link's target.
    return Location("file", "", os.path.join(os.getcwd(), text))


def parse_arguments(texts: Iterable[str]) -> list[UriOrPath]:
    """Parse arguments, and import the modules of the services that they name.

    An argument that contains `://` is a uri, any other is a path. The imports take most of the
    time of a short command. They run before the event loop starts, while Ctrl-C still ends the
    process immediately.

    Raises:
        ValueError: An argument is not valid, or an option has no effect on any of the arguments.
    """
    arguments = [UriOrPath(text, _parse_location(text)) for text in texts]
    schemes = {argument.location.scheme for argument in arguments} & set(_SERVICES)
    for name, is_given in (
        ("--endpoint-url", settings.endpoint_url),
        ("--anonymous", settings.anonymous),
    ):
        if is_given and not schemes:
            raise ValueError(f"{name} needs a gs://, s3:// or az:// uri")
    if endpoint_url() and len(schemes) > 1:
        name = "--endpoint-url" if settings.endpoint_url else ENDPOINT_URL
        raise ValueError(
            f"{name} is for uris of one service; for several, set STORAGE_EMULATOR_HOST or "
            "AWS_ENDPOINT_URL_S3"
        )
    import_module("aioflux.store")
    for scheme in sorted(schemes):
        import_module(_SERVICES[scheme])
    return arguments


def parse_root_argument(text: str) -> UriOrPath:
    """Parse one argument that names a bucket, a prefix or an existing local directory.

    Raises:
        NotFoundError: The local directory does not exist.
        ValueError: The argument is not valid.
    """
    [root] = parse_arguments([text])
    if root.is_local and not os.path.isdir(root.path):
        text = f"there is no directory {root.text}; {root.hint()}"
        raise NotFoundError(text, uri=str(root.location))
    return root


def as_prefix(key: str) -> str:
    """Return the prefix of all keys below `key`: it ends in `/`, or is empty for a bucket."""
    return key if not key or key.endswith("/") else f"{key}/"


async def find(store: Store, key: str) -> ObjectMeta | None:
    """Return the metadata of an object, or None if it does not exist."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class NameFilter:
    """The names, relative to the argument, that `--include` and `--exclude` admit."""

    included: tuple[re.Pattern[str], ...] = ()
    """Patterns of which one must match; none for all names."""
    excluded: tuple[re.Pattern[str], ...] = ()
    """Patterns of which none may match."""

    @classmethod
    def parse(cls, include: Sequence[str] | None, exclude: Sequence[str] | None) -> NameFilter:
        """Return the filter of two options.

        Raises:
            typer.BadParameter: A pattern is malformed.
        """
        return cls(
            tuple(map(_compile_filter, include or ())), tuple(map(_compile_filter, exclude or ()))
        )

    def admits(self, name: str) -> bool:
        """Return whether a name passes the filter."""
        if self.excludes(name):
            return False
        return not self.included or any(pattern.fullmatch(name) for pattern in self.included)

    def excludes(self, name: str) -> bool:
        """Return whether `--exclude` names an object or file, or a directory that it is in."""
        return any(pattern.fullmatch(name) for pattern in self.excluded)


def _compile_filter(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for a name, or for a directory above it.

    Without a `/` it is for the last segment of the name or the directory.
    """
    try:
        regex = compile_glob(pattern.strip("/")).pattern
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    start = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    return re.compile(f"{start}(?:{regex})(?:/.*)?", re.DOTALL)


def run_for_each(
    texts: Iterable[str],
    act: Callable[[UriOrPath], Awaitable[None]],
    *,
    prefixes: bool = False,
    finish: Callable[[Report], Awaitable[int]] | None = None,
) -> int:
    """Run `act` with each argument, and with each match of a pattern; return the exit status.

    If it fails for an argument, an error is printed, and the next one follows.

    Args:
        texts: The arguments.
        act: The command for one argument.
        prefixes: Whether patterns match prefixes, too.
        finish: Prints what follows the last argument, and returns the exit status.
    """
    arguments = parse_arguments(texts)

    async def work() -> int:
        report = Report()
        for argument in arguments:
            async with report.printing(), aclosing(expand(argument, prefixes=prefixes)) as found:
                async for each in found:
                    async with report.printing():
                        await act(each)
        return await finish(report) if finish else report.finish()

    return run(work)


async def expand(argument: UriOrPath, *, prefixes: bool = False) -> AsyncGenerator[UriOrPath, None]:
    """Yield what a pattern matches, by name; an argument without a pattern as it is.

    Args:
        argument: The argument.
        prefixes: Whether prefixes match, too; their names end in `/`.

    Raises:
        NotFoundError: Nothing matches.
        ValueError: The pattern is malformed, or the bucket has one.
    """
    text = argument.path if argument.is_local else argument.location.key
    if not PATTERN.search(text):
        yield argument
        return
    alternatives = _alternatives(text)
    if len(alternatives) > 1 and await _exists(argument):
        alternatives = [text]
    is_found, seen = False, set[str]()
    for pattern in alternatives:
        find_matches = _local_matches if argument.is_local else partial(_matches, prefixes=prefixes)
        async with aclosing(find_matches(argument, pattern)) as found:
            async for each in found:
                if each.text not in seen:
                    if len(alternatives) > 1:
                        seen.add(each.text)
                    is_found = True
                    yield each
    if not is_found:
        listed = one_line(str(argument.location)[: -len(text)] + _literal_directory(text))
        where = listed if "://" in argument.text else _literal_directory(text) or "."
        raise NotFoundError(
            f"nothing matches {one_line(argument.text)}; list the names with aioflux ls "
            f"{one_line(where)}",
            uri=str(argument.location),
        )


def _literal_directory(pattern: str) -> str:
    literal = PATTERN.split(pattern, maxsplit=1)[0]
    return literal[: literal.rfind("/") + 1]


def _alternatives(pattern: str) -> list[str]:
    """Return a pattern for each text in braces in which a `/` is: levels are matched one by one."""
    found = re.search(r"\{([^{}]*/[^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [
        each for text in found[1].split(",") for each in _alternatives(f"{before}{text}{after}")
    ]


async def _exists(argument: UriOrPath) -> bool:
    """Return whether a file or an object has literally this name."""
    if argument.is_local:
        return os.path.lexists(argument.path)  # noqa: ASYNC240  one call
    store, key = argument.open()
    return await find(store, key) is not None


async def _local_matches(argument: UriOrPath, pattern: str) -> AsyncGenerator[UriOrPath, None]:
    is_name = os.path.lexists(pattern)  # noqa: ASYNC240  one call
    for name in [pattern] if is_name else _find_paths(pattern):
        location = Location("file", "", os.path.join(os.getcwd(), name))
        yield UriOrPath(str(location) if "://" in argument.text else name, location)


def _find_paths(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches; with `**` only those of files."""
    base = _literal_directory(pattern)
    rest = pattern[len(base) :]
    if "**" not in rest:
        yield from _find_levels(base, rest.split("/"))
        return
    admits = compile_glob(rest).fullmatch
    for directory, names, files in os.walk(base or "."):
        names.sort()
        above = f"{directory.rstrip('/')}/" if base else f"{directory}/"[2:]
        for name in sorted(files):
            if admits((above + name)[len(base) :]) and not is_temporary(name):
                yield above + name


def _find_levels(base: str, segments: Sequence[str]) -> Iterator[str]:
    """Yield the paths below a directory whose segments match patterns, level by level."""
    pattern, *rest = segments
    admits = compile_glob(pattern).fullmatch
    try:
        names = sorted(os.listdir(base or "."))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = f"{base}{name}"
        if not admits(name) or is_temporary(name):
            continue
        if not rest:
            yield path
        elif rest == [""]:
            yield from [f"{path}/"] if os.path.isdir(path) else []
        else:
            yield from _find_levels(f"{path}/", rest)


async def _matches(
    argument: UriOrPath, pattern: str, *, prefixes: bool
) -> AsyncGenerator[UriOrPath, None]:
    """Yield the objects, and perhaps prefixes, of a bucket that a pattern matches."""
    store, _ = argument.open()

    def match(key: str, meta: ObjectMeta | None) -> UriOrPath:
        location = replace(argument.location, key=key)
        return UriOrPath(str(location), location, meta)

    if (meta := await find(store, pattern)) is not None:
        yield match(pattern, meta)
    elif prefixes and await store.list_all(as_prefix(pattern), limit=1):
        yield match(pattern, None)
    elif prefixes and "**" not in pattern:
        base = _literal_directory(pattern)
        levels = _list_levels(store, base, pattern[len(base) :].split("/"))
        async with aclosing(levels):
            async for key, meta in levels:
                yield match(key, meta)
    else:
        base = _literal_directory(pattern)
        is_level = "/" not in pattern[len(base) :] and "**" not in pattern
        admits = compile_glob(pattern).fullmatch
        # One level is listed without those below; for several, the service filters if it can.
        pages = store.list_pages(
            literal_prefix(pattern),
            delimiter="/" if is_level else "",
            match_glob="" if is_level else pattern,
        )
        async with aclosing(pages):
            async for page in pages:
                for each in page:
                    if admits(each.key):
                        yield match(each.key, each)


async def _list_levels(
    store: Store, base: str, segments: Sequence[str]
) -> AsyncGenerator[tuple[str, ObjectMeta | None], None]:
    """Yield objects and prefixes below `base` whose segments match patterns, level by level."""
    pattern, *rest = segments
    admits = compile_glob(pattern).fullmatch
    listing = await store.list_all(base + literal_prefix(pattern), delimiter="/")
    found: list[tuple[str, ObjectMeta | None]] = [
        (meta.key, meta) for meta in listing if not rest and admits(meta.key[len(base) :])
    ]
    found += ((key, None) for key in listing.prefixes if admits(key[len(base) : -1]))
    for key, meta in sorted(found, key=itemgetter(0)):
        if not rest or rest == [""]:
            yield key, meta
            continue
        inner = _list_levels(store, key, rest)
        async with aclosing(inner):
            async for each in inner:
                yield each

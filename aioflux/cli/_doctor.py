"""`aioflux doctor`: checks of everything between this machine and a bucket, with advice.

requests -> judge_... (pure) -> Finding -> one line
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import typer

import aioflux
from aioflux._values.distribution import DISTRIBUTION, pip_install
from aioflux._values.stats import format_size
from aioflux._values.uri import join_uri, parse_uri
from aioflux.cli._arguments import Json, as_prefix, endpoint_url, find, parse_arguments
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines
from aioflux.cli._settings import ENDPOINT_URL, settings
from aioflux.cli._text import describe, format_timestamp, json_line, one_line
from aioflux.errors import (
    AiofluxError,
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    TransientError,
)
from aioflux.options import ANONYMOUS, RetryPolicy, S3Access

if TYPE_CHECKING:
    from aioflux._services.http import HTTPService
    from aioflux._services.sender import Sender
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._arguments import UriOrPath
    from aioflux.store import Store

_LIBRARIES = ("uvloop", "aiohttp", "torch")
_EXTRAS = {"s3": ("botocore", "s3"), "az": ("azure-identity", "azure")}
_ENDPOINTS = {
    "gs": ("STORAGE_EMULATOR_HOST",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "az": ("AZURE_STORAGE_CONNECTION_STRING",),
}
"""Variables with the endpoint."""
_CHECKS = ("list", "read", "write", "delete")
_PERMISSIONS = {
    "gs": [f"storage.objects.{verb}" for verb in ("list", "get", "create", "delete")],
    "s3": ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
    "az": ["Storage Blob Data Reader"] * 2 + ["Storage Blob Data Contributor"] * 2,
}
"""Permission, or on Azure the role, for each of `_CHECKS`."""
_IGNORED = ("the server ignores the condition", "let one process write at a time, see docs/s3.md")
_MAX_SKEW_SECONDS = 900.0  # docs.aws.amazon.com/AmazonS3/latest/API/RESTAuthentication.html
_NUM_PINGS = 5

Kind: TypeAlias = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    kind: Kind
    name: str
    text: str
    advice: str = ""


def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Bucket, prefix, object or directory.")],
    *,
    write: Annotated[
        bool, typer.Option("--write", help="Also write a temporary object, and delete it.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check installation, credentials, network and permissions for a URI, and give advice.

    Each check prints a line: ok, warning, failed or skipped. The status is 1 if a check failed.
    No secret is printed. The temporary object of --write is below .aioflux-uploads/.

    --json: uri, kind, name, text and advice.

    Example: aioflux doctor --write gs://bucket/train
    """
    [argument] = parse_arguments([uri])

    async def work() -> int:
        status = 0
        async with aclosing(_examine(argument, write=write)) as findings:
            async for finding in findings:
                status |= finding.kind == "failed"
                row = {"uri": str(argument.location), **asdict(finding)}
                await print_lines(json_line(row) if as_json else format_line(finding))
        return status

    return run(work)


def format_line(finding: Finding) -> str:
    """Return the line for people."""
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{finding.kind:<8} {finding.name}: {one_line(finding.text + advice)}"


def judge_error(name: str, error: Exception, scheme: str) -> Finding:
    """Return the finding of a check that raised an error."""
    advice = ""
    if isinstance(error, PermissionDeniedError) and scheme in _PERMISSIONS:
        needed = _PERMISSIONS[scheme][_CHECKS.index(name)] if name in _CHECKS else "permission"
        advice = f"the credentials must be valid, and need {needed}"
    elif isinstance(error, TransientError) and name == "connection":
        advice = "check host and port of the endpoint, the firewall and the proxy variables"
    elif isinstance(error, socket.gaierror):
        advice = "check the spelling of the endpoint, the name server and the VPN"
    return Finding("failed", name, describe(error), advice)


def judge_installation(versions: Mapping[str, str], root: str, scheme: str) -> Iterator[Finding]:
    """Yield findings about the versions of distributions, empty for those that are missing."""
    others = (f"{name} {versions[name] or 'missing'}" for name in ("Python", *_LIBRARIES))
    text = f"aioflux {aioflux.__version__} in {root}; {', '.join(others)}"
    if other := versions["aioflux"]:
        text += f"; the distribution aioflux {other}, another project, is installed, too"
        advice = f"pip uninstall aioflux {DISTRIBUTION}, then {pip_install('cli')}"
        yield Finding("warning", "installation", text, advice)
    elif (installed := versions[DISTRIBUTION]) not in {"", aioflux.__version__}:
        text += f"; pip has installed {DISTRIBUTION} {installed}"
        yield Finding("warning", "installation", text, "check PYTHONPATH and the environment")
    else:
        yield Finding("ok", "installation", text)
    library, extra = _EXTRAS.get(scheme, ("Python", ""))
    if not versions[library]:
        text = f"{library} is missing, which finds credentials that are not in the environment"
        yield Finding("warning", "extra", text, pip_install(extra))


def judge_credentials(text: str, expires_at: float | None, now: float) -> Finding:
    """Return the finding about credentials that were found."""
    if expires_at is None:
        return Finding("ok", "credentials", text)
    text += f", valid until {format_timestamp(expires_at)}"
    if expires_at < now:
        return Finding("failed", "credentials", text, "they have expired: renew them")
    return Finding("ok", "credentials", text)


def judge_clock(date: str, now: float) -> Finding:
    """Return the finding about the local clock, given the Date of a response received now."""
    try:
        skew = parsedate_to_datetime(date).timestamp() - now
    except ValueError:
        return Finding("skipped", "clock", "the server sent no date")
    text = f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the clock of the server"
    if abs(skew) <= 60:
        return Finding("ok", "clock", text)
    advice = "set the clock: signatures and tokens are rejected if it differs by 15 minutes"
    kind: Kind = "failed" if abs(skew) > _MAX_SKEW_SECONDS else "warning"
    return Finding(kind, "clock", text, advice)


def endpoint_source(argument: UriOrPath, host: str, environ: Mapping[str, str]) -> str:
    """Return the option or variable that contains the host of the endpoint."""
    if endpoint_url():
        return "--endpoint-url" if settings.endpoint_url else ENDPOINT_URL
    scheme = argument.location.scheme
    is_profile = scheme == "s3" and ".amazonaws." not in host
    names = [name for name in _ENDPOINTS[scheme] if host in environ.get(name, "")]
    return [*names, "the AWS profile" if is_profile else "the default"][0]


def _judge_directory(path: Path) -> Finding:
    directory = next(each for each in (path, *path.parents) if each.is_dir())
    if directory != path and not path.exists():
        return Finding(
            "warning", "directory", f"{path} does not exist", "a uri has a scheme: gs://"
        )
    text = f"{format_size(shutil.disk_usage(directory).free)} free in {directory}"
    with suppress(OSError):  # not on Linux
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        above = [mount for mount in mounts if directory.resolve().is_relative_to(mount[1])]
        text += f", {max(above, key=lambda mount: len(mount[1]))[2]}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding("warning", "directory", text, "this user cannot write here")
    return Finding("ok", "directory", text)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


async def _attempt(name: str, scheme: str, check: Awaitable[str | Finding]) -> Finding:
    """Return the finding of a check, which returns a text if it is ok, or raises an error."""
    try:
        found = await check
    except (AiofluxError, OSError, ValueError) as exc:
        return judge_error(name, exc, scheme)
    return found if isinstance(found, Finding) else Finding("ok", name, found)


async def _examine(argument: UriOrPath, *, write: bool) -> AsyncGenerator[Finding, None]:
    scheme = argument.location.scheme
    needed = (each for each, _ in _EXTRAS.values())
    versions = {name: _version(name) for name in ("aioflux", DISTRIBUTION, *_LIBRARIES, *needed)}
    versions["Python"] = platform.python_version()
    for finding in judge_installation(versions, os.path.dirname(aioflux.__file__), scheme):
        yield finding
    if argument.is_local:
        yield await asyncio.to_thread(_judge_directory, Path(argument.location.key))
    root, key = argument.split(follow=True)
    async with aclosing(_open(argument, root)) as store:
        are_ok = True
        for name, check in _SERVER_CHECKS.items() if scheme in _ENDPOINTS else ():
            yield (finding := await _attempt(name, scheme, check(argument, store)))
            are_ok &= finding.kind != "failed" or name == "clock"
            if finding.kind == "failed" and name not in {"credentials", "clock"}:
                break
        if not are_ok:
            yield Finding("skipped", "objects", "list, read and write need the checks above")
            return
        async with aclosing(_examine_objects(argument, store, key, write=write)) as findings:
            async for finding in findings:
                yield finding


def _open(argument: UriOrPath, root: str) -> Store:
    """Open a store that retries little, and that does not require preconditions of S3 servers."""
    from aioflux.store import open_store

    credentials: Any = ANONYMOUS if settings.anonymous else None
    if argument.location.scheme == "s3":
        credentials = S3Access(anonymous=settings.anonymous, require_conditions=False)
    retry = RetryPolicy(max_attempts=3, deadline_seconds=20.0)
    endpoint = endpoint_url() or None
    return open_store(root, retry=retry, credentials=credentials, endpoint_url=endpoint)


def _sender(store: Store) -> Sender:
    from aioflux.store import sessions_of

    return cast("HTTPService", sessions_of(store).current().service).sender


async def _judge_credentials(_: UriOrPath, store: Store) -> Finding:
    return judge_credentials(*await _sender(store).identity(), time.time())


async def _find_endpoint(argument: UriOrPath, store: Store) -> str:
    origin, pool = await _sender(store).open_server()
    text = f"{origin.url} ({endpoint_source(argument, origin.host, os.environ)})"
    if pool.proxy:
        names = {f"{origin.scheme}_proxy", "all_proxy"}
        variables = " or ".join(name for name in os.environ if name.lower() in names)
        text += f" through the proxy {pool.proxy.origin.url} ({variables})"
    return text


async def _resolve_host(_: UriOrPath, store: Store) -> str:
    origin, pool = await _sender(store).open_server()
    host = (pool.proxy.origin if pool.proxy else origin).host
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return f"{host} is {', '.join(dict.fromkeys(str(address[0]) for *_, address in found))}"


async def _connect(_: UriOrPath, store: Store) -> str:
    response = await _sender(store).ping()
    tls = response.connection.tls if response.connection else None
    certificate = tls.getpeercert() if tls else None
    if tls is None or not certificate:
        return f"HTTP {response.status}, without TLS"
    return f"HTTP {response.status}, {tls.version()}, certificate until {certificate['notAfter']}"


async def _judge_clock(_: UriOrPath, store: Store) -> Finding:
    response = await _sender(store).ping()
    return judge_clock(response.headers.get(b"date", b"").decode("latin-1"), time.time())


async def _time_round_trip(_: UriOrPath, store: Store) -> str:
    times = [time.perf_counter()]
    for _number in range(_NUM_PINGS):
        await _sender(store).ping()
        times.append(time.perf_counter())
    median = statistics.median(after - before for before, after in pairwise(times))
    return f"{1e3 * median:.1f} ms, the median of {_NUM_PINGS} requests"


_SERVER_CHECKS: dict[str, Callable[[UriOrPath, Store], Awaitable[str | Finding]]] = {
    "credentials": _judge_credentials,
    "endpoint": _find_endpoint,
    "dns": _resolve_host,
    "connection": _connect,
    "clock": _judge_clock,
    "round trip": _time_round_trip,
}


async def _examine_objects(
    argument: UriOrPath, store: Store, key: str, *, write: bool
) -> AsyncGenerator[Finding, None]:
    """Yield findings about listing; reading `key`, or the first object below; and writing."""
    scheme, prefix = argument.location.scheme, as_prefix(key)
    found: list[ObjectMeta] = []

    async def list_first() -> str:
        found.extend(await store.list_all(prefix, limit=1))
        return f"found {found[0].uri}" if found else "there are no objects"

    async def read() -> str | Finding:
        nonlocal prefix
        if prefix != key and (meta := await find(store, key)):
            found.insert(0, meta)
            prefix = key[: key.rfind("/") + 1]
        if not found:
            return Finding("skipped", "read", "there is no object to read")
        await store.get_range(found[0].key, start=0, end=1)
        return f"the first byte of {found[0].uri}"

    yield await _attempt("list", scheme, list_first())
    yield await _attempt("read", scheme, read())
    if not write:
        yield Finding("skipped", "write", "not tried; --write tries it with a temporary object")
        return
    from aioflux.store import TEMPORARY_PREFIX

    root = join_uri(store.uri, f"{prefix}{TEMPORARY_PREFIX}")
    async with (
        aclosing(_open(argument, root)) as temporary,
        aclosing(_examine_writes(temporary, scheme)) as findings,
    ):
        async for finding in findings:
            yield finding
    if argument.is_local:
        with suppress(OSError):  # not empty, or missing
            os.rmdir(parse_uri(root).key)


async def _examine_writes(store: Store, scheme: str) -> AsyncGenerator[Finding, None]:
    """Yield findings about a write, its preconditions, and the delete of the temporary object."""
    key = uuid.uuid4().hex
    metas: list[ObjectMeta] = []

    async def write() -> str:
        metas.append(await store.put(key, b"1"))
        return metas[0].uri

    async def create() -> None:
        metas.append(await store.put(key, b"2", mode="create"))

    async def delete_replaced() -> None:
        metas.append(await store.put(key, b"3"))
        await store.delete(metas[0])

    async def reject(name: str, request: Callable[[], Awaitable[None]]) -> str | Finding:
        is_ignored = name.partition(" ")[0] in await store.check_conditions()
        with suppress(AlreadyExistsError, NotFoundError, PreconditionFailedError):
            await request()
            is_ignored = True
        return Finding("warning", name, *_IGNORED) if is_ignored else "the server compares it"

    async def delete() -> str:
        await store.delete(metas[-1])  # with a name, it needs the permission to read, too
        return "the temporary object is deleted"

    yield (finding := await _attempt("write", scheme, write()))
    if finding.kind == "ok":
        for name, request in (("create if absent", create), ("delete if same", delete_replaced)):
            yield await _attempt(name, scheme, reject(name, request))
        yield await _attempt("delete", scheme, delete())

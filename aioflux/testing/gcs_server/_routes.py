"""Routing: the operation of a request, by its method and target.

A path is split at `/` before percent-decoding, so that a name may have an encoded slash (`%2F`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote_to_bytes

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._state import State

Handler = Callable[[State, Request], Response]

_RETRY_ROOTS = frozenset({"retry_test", "retry_tests"})
_JSON_ROOTS = frozenset({"storage", "upload", "download", "batch", *_RETRY_ROOTS})
_MAX_CACHED = 8192
_PERMISSIONS = {
    **dict.fromkeys(("compose", "copy", "rewrite"), ("objects.get", "objects.create")),
    **dict.fromkeys(("create", "part", "complete"), ("multipartUploads.create", "objects.create")),
    "list_parts": ("multipartUploads.listParts",),
    "move": ("objects.move", "objects.create"),
}
"""Permissions of the operations with this verb; those of other operations have the same verb."""
_VERBS = {"insert": ("create",), "patch": ("get", "update"), "update": ("get", "update")}


@dataclass(frozen=True, slots=True)
class Url:
    """Decoded request target."""

    segments: tuple[str, ...]
    query: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]

    @property
    def is_json(self) -> bool:
        """True if the path belongs to the JSON API. All other paths are `/bucket/key`."""
        first = self.segments[0] if self.segments else ""
        return first in _RETRY_ROOTS or (len(self.segments) > 1 and first in _JSON_ROOTS)


@dataclass(frozen=True, slots=True)
class Route:
    """Operation for one method and one pattern of paths.

    If several routes match, the route with the most `query` parameters is used.
    """

    method: str
    pattern: str
    """Path in which `{name}` matches one segment, and a final `{name*}` all remaining segments."""
    operation: str
    """Name of the operation in Google's storage-testbench. XML operations begin with `xml.`."""
    handler: Handler
    query: Mapping[str, str | None] | None = None
    """Required query parameters with their values. None allows any value."""

    @property
    def permissions(self) -> frozenset[str]:
        """Permissions that the operation needs, apart from that to replace an object.

        Source: cloud.google.com/storage/docs/access-control/iam-json and iam-xml.
        """
        *_, resource, verb = self.operation.replace("multipart", "multipartUploads").split(".")
        names = _PERMISSIONS.get(verb) or [
            f"{resource}.{name}" for name in _VERBS.get(verb, (verb,))
        ]
        return frozenset(f"storage.{name}" for name in names)


@dataclass(frozen=True, slots=True)
class Match:
    """Route of a request, and the decoded target of the request."""

    route: Route
    url: Url
    params: Mapping[str, str]

    @property
    def operation(self) -> str:
        """Name of the operation, for example `storage.objects.get`."""
        return self.route.operation


class Router:
    """Table of routes, with a cache because clients repeat targets."""

    def __init__(self, routes: Iterable[Route]) -> None:
        ordered = sorted(routes, key=lambda route: -len(route.query or {}))
        self._routes = [(route, tuple(route.pattern.strip("/").split("/"))) for route in ordered]
        self._cache: dict[tuple[str, bytes], Match] = {}

    def match(self, method: str, target: bytes) -> Match:
        """Find the operation of a request. Raise APIError (400, 404, 405) if there is none."""
        cached = self._cache.get((method, target))
        if cached is not None:
            return cached
        match = self._search(method, parse_target(target))
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[method, target] = match
        return match

    def _search(self, method: str, url: Url) -> Match:
        segments = url.segments
        if not url.is_json and len(segments) == 2 and not segments[1]:
            segments = segments[:1]  # `/bucket/` means the bucket, not an object
        path_exists = False
        for route, pattern in self._routes:
            if url.is_json != (pattern[0] in _JSON_ROOTS):
                continue
            params = _match_path(pattern, segments)
            if params is None or not _matches_query(route.query or {}, url.query):
                continue
            if route.method == method:
                return Match(route, url, params)
            path_exists = True
        if path_exists:
            raise APIError(405, "methodNotAllowed", f"Method {method} is not allowed here")
        raise APIError(404, "notFound", "Not Found")


def parse_target(target: bytes) -> Url:
    """Decode a request target. Raise APIError (400) if the decoded bytes are not UTF-8."""
    if target[:4] == b"http" and b"://" in target:
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    path, _, query = target.partition(b"?")
    try:
        raw_segments = path.removeprefix(b"/").split(b"/")
        segments = tuple(unquote_to_bytes(segment).decode() for segment in raw_segments)
        pairs = tuple(parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict"))
    except UnicodeDecodeError as exc:
        raise invalid("The request target is not valid UTF-8") from exc
    return Url(segments, dict(pairs), pairs)


def is_json_target(target: bytes) -> bool:
    """Guess whether a target, which may be undecodable, belongs to the JSON API."""
    first = target.partition(b"?")[0].removeprefix(b"/").partition(b"/")[0]
    return first.decode("latin-1") in _JSON_ROOTS


def _matches_query(required: Mapping[str, str | None], query: Mapping[str, str]) -> bool:
    return all(name in query and value in (None, query[name]) for name, value in required.items())


def _match_path(pattern: tuple[str, ...], segments: tuple[str, ...]) -> Mapping[str, str] | None:
    """Return the parameters in a path, or None if the path does not match."""
    has_rest = pattern[-1].endswith("*}")
    fixed = len(pattern) - has_rest
    if len(segments) <= fixed if has_rest else len(segments) != fixed:
        return None
    params: dict[str, str] = {}
    for part, segment in zip(pattern[:fixed], segments, strict=False):
        if part.startswith("{"):
            params[part[1:-1]] = segment
        elif part != segment:
            return None
    if has_rest:
        params[pattern[-1][1:-2]] = "/".join(segments[fixed:])
    return params if all(params.values()) else None

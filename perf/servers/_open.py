"""open_server: starts the server of a spec, or the embedded server in place of nginx."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from perf.servers._azurite import open_azurite
from perf.servers._embedded import open_embedded
from perf.servers._nginx import missing, open_nginx
from perf.servers._seaweedfs import open_seaweedfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.servers._spec import Server, ServerSpec

__all__ = ["choose", "open_server"]

_STARTS = {
    "nginx": open_nginx,
    "embedded": open_embedded,
    "seaweedfs": open_seaweedfs,
    "azurite": open_azurite,
}
_REPLACED = "the embedded server replaces nginx"


def choose(spec: ServerSpec, lacking: str) -> tuple[ServerSpec, tuple[str, ...]]:
    """Return the spec with a server that supports it, and notes about differences.

    Args:
        spec: The requested server.
        lacking: Message about missing parts of nginx on this machine; empty if nginx can run.
    """
    if spec.kind in {"seaweedfs", "azurite"}:
        if spec.tls or spec.has_faults:
            raise RuntimeError(f"{spec.kind} supports neither TLS nor faults here")
        is_paced = spec.connection_bytes_per_second or spec.received_bytes_per_second
        if is_paced or spec.latency_seconds:
            return spec, (f"{spec.kind} adds no latency and has no bandwidth limit",)
        return spec, ()
    if spec.kind == "embedded":
        return spec, ()
    if spec.lines:
        return replace(spec, kind="embedded"), (f"{_REPLACED}, which has no shards of text",)
    if spec.has_faults:
        return replace(spec, kind="embedded"), (f"{_REPLACED}, which has no faults",)
    if lacking and spec.received_bytes_per_second:
        note = f"{_REPLACED}, and does not limit the bandwidth of uploads: {lacking}"
        return replace(spec, kind="embedded"), (note,)
    if lacking:
        return replace(spec, kind="embedded"), (f"{_REPLACED}: {lacking}",)
    return spec, ()


@contextmanager
def open_server(spec: ServerSpec) -> Iterator[Server]:
    """Run a server during a `with` block.

    At the end of the block, or when this process dies, the server is stopped and its objects are
    deleted.

    Raises:
        RuntimeError: The server did not start; the message contains its output.
    """
    served, notes = choose(spec, missing() if spec.kind == "nginx" else "")
    with _STARTS[served.kind](served) as server:
        yield replace(server, notes=(*notes, *server.notes))

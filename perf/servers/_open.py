"""open_server: the server that a scenario asks for, or the one that can stand in."""

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
_STANDS_IN = "the embedded server stands in for nginx"


def choose(spec: ServerSpec, lacking: str) -> tuple[ServerSpec, tuple[str, ...]]:
    """Return the spec that can be served, and the notes that go with it.

    Args:
        spec: What is asked for.
        lacking: What nginx lacks on this machine, in words; empty where it can serve.
    """
    if spec.kind in {"seaweedfs", "azurite"}:
        if spec.tls or spec.has_faults:
            raise RuntimeError(f"{spec.kind} has neither TLS nor faults here")
        is_paced = spec.connection_bytes_per_second or spec.received_bytes_per_second
        if is_paced or spec.latency_seconds:
            return spec, (f"{spec.kind} answers at once and at full speed: no link is simulated",)
        return spec, ()
    if spec.kind == "embedded":
        return spec, ()
    if spec.lines:
        return replace(spec, kind="embedded"), (f"{_STANDS_IN}: shards of text are not nginx's",)
    if spec.has_faults:
        return replace(spec, kind="embedded"), (f"{_STANDS_IN}: faults are not nginx's",)
    if lacking and spec.received_bytes_per_second:
        note = f"{_STANDS_IN}, and does not pace uploads: {lacking}"
        return replace(spec, kind="embedded"), (note,)
    if lacking:
        return replace(spec, kind="embedded"), (f"{_STANDS_IN}: {lacking}",)
    return spec, ()


@contextmanager
def open_server(spec: ServerSpec) -> Iterator[Server]:
    """Run a server for the length of a `with` block.

    It ends with the block, and also when this process dies; what it stored goes with it.

    Raises:
        RuntimeError: It did not start; says what it printed.
    """
    served, notes = choose(spec, missing() if spec.kind == "nginx" else "")
    with _STARTS[served.kind](served) as server:
        yield replace(server, notes=(*notes, *server.notes))

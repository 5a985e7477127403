"""open_server: the server that a scenario asks for, or the one that can stand in."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from perf.servers._embedded import open_embedded
from perf.servers._nginx import missing, open_nginx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.servers._spec import Server, ServerSpec

__all__ = ["choose", "open_server"]

_STANDS_IN = "the embedded server stands in for nginx"


def choose(spec: ServerSpec, lacking: str) -> tuple[ServerSpec, tuple[str, ...]]:
    """Return the spec that can be served, and the notes that go with it.

    Args:
        spec: What is asked for.
        lacking: What nginx lacks on this machine, in words; empty where it can serve.
    """
    if spec.kind == "embedded":
        return spec, ()
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
    start = open_nginx if served.kind == "nginx" else open_embedded
    with start(served) as server:
        yield replace(server, notes=(*notes, *server.notes))

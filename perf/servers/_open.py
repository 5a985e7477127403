"""open_server: starts the server of a spec, or the embedded server in place of nginx."""

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

_REPLACED = "the embedded server replaces nginx"


def choose(spec: ServerSpec, lacking: str) -> tuple[ServerSpec, tuple[str, ...]]:
    """Return the spec with a server that supports it, and notes about differences.

    Args:
        spec: The requested server.
        lacking: Message about missing parts of nginx on this machine; empty if nginx can run.
    """
    if spec.kind == "nginx" and spec.has_faults:
        return replace(spec, kind="embedded"), (f"{_REPLACED}, which has no faults",)
    if spec.kind == "nginx" and lacking:
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
    with (open_nginx if served.kind == "nginx" else open_embedded)(served) as server:
        yield replace(server, notes=(*notes, *server.notes))

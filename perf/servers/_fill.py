"""Upload of the objects of a spec to a server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from perf.servers._spec import contents, lines_of
from perf.servers._states import write_state
from perf.work import lines_key, set_key, state_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.servers._spec import ServerSpec

__all__ = ["fill"]


def fill(spec: ServerSpec, put: Callable[[str, bytes], object]) -> None:
    """Store all objects of a spec: single objects, sets, shards of lines, and states.

    Args:
        spec: The spec.
        put: Stores bytes under a key.
    """
    for size, count in spec.objects:
        data = contents(size)
        for index in range(count):
            put(f"{size}/{index}", data)
    for size, count in spec.sets:
        data = contents(size)
        for index in range(count):
            put(set_key(size, count, index), data)
    for size, count in spec.lines:
        data = lines_of(size)
        for index in range(count):
            put(lines_key(size, count, index), data)
    for dtype, size in spec.states:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "state"
            write_state(dtype, size, path)
            put(state_key(dtype, size), path.read_bytes())

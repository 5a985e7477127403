"""aioflux: `save` and `load` of `aioflux.checkpoint`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.auth.credentials import AnonymousCredentials

import aioflux.checkpoint
from perf._meter import steady
from perf.peers._parts import ssl_context
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


def _options(work: Work) -> dict[str, Any]:
    """Return the options of the store, which are defaults except without a cloud."""
    options: dict[str, Any] = {"endpoint_url": work.url}
    if work.ca_file:
        # With TLS, the store does not recognise an emulator, and would look for credentials.
        options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        options["ssl_context"] = ssl_context(work)
    return options


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    options = _options(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        uri = work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")
        aioflux.checkpoint.save(state, uri, **options)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    options = _options(work)

    async def load(work: Work) -> int:
        uri = work.uri(state_key(work.dtype, work.size_bytes))
        return touch(aioflux.checkpoint.load(uri, **options))

    return await steady(load, work)

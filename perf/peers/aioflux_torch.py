"""torch.save and torch.load with the files of `open_writer` and `open_reader`, with defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from google.auth.credentials import AnonymousCredentials

from aioflux.checkpoint import open_reader, open_writer
from perf._meter import steady
from perf.peers._parts import ssl_context
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from aioflux.options import StoreOptions
    from perf.work import Work


def _options(work: Work) -> StoreOptions:
    if not work.ca_file:
        return {"endpoint_url": work.url}
    # With TLS, the store does not recognise an emulator, and would look for credentials.
    credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
    context = ssl_context(work)
    return {"endpoint_url": work.url, "ssl_context": context, "credentials": credentials}


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    options = _options(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        uri = work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")
        with open_writer(uri, **options) as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    options = _options(work)

    async def load(work: Work) -> int:
        uri = work.uri(state_key(work.dtype, work.size_bytes))
        with open_reader(uri, **options) as file:
            return touch(torch.load(file, weights_only=True))

    return await steady(load, work)

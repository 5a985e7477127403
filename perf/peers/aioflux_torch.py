"""torch.save and torch.load with the files of `open_writer` and `open_reader`, with defaults."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import torch

from aioflux.checkpoint import open_reader, open_writer
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


def _ssl_context(work: Work) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=work.ca_file) if work.ca_file else None


async def save_state(work: Work) -> int:
    """Save a state and return the bytes of its tensors."""
    state = state_of(work.dtype, work.size_bytes)
    uri = work.uri(f"put/{state_key(work.dtype, work.size_bytes)}")
    with open_writer(uri, endpoint_url=work.url, ssl_context=_ssl_context(work)) as file:
        torch.save(state, file)
    return num_bytes_of(state)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    uri = work.uri(state_key(work.dtype, work.size_bytes))
    with open_reader(uri, endpoint_url=work.url, ssl_context=_ssl_context(work)) as file:
        return touch(torch.load(file, weights_only=True))

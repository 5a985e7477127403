"""obstore: GCSStore (Rust, XML API)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import GCSStore

from perf.work import bounded

if TYPE_CHECKING:
    from perf.work import Work


def _open(work: Work) -> GCSStore:
    return GCSStore(
        work.bucket,
        config={"base_url": work.url, "bearer_token": "none", "skip_signature": True},
        client_options={"allow_http": True},
    )


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    store = _open(work)

    async def one(key: str) -> int:
        response = await store.get_async(key)
        return len(await response.bytes_async())

    return await bounded(one, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    store = _open(work)
    body = work.body()

    async def one(key: str) -> int:
        await store.put_async(f"put/{key}", body, use_multipart=False)
        return len(body)

    return await bounded(one, work)

"""Reads of one object by each call of aioflux and of its peers, for the table of `perf.faults`.

`python -m perf.faulty_reads '<json>'` does one read and prints a JSON line with digest, error and
time.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import aioflux
    from aioflux import sync

__all__ = ["OURS", "PEERS", "WARM_UP", "WARM_UP_BYTES", "Call", "Read"]

MIB = 1024 * 1024
STEP_BYTES = MIB
"""Size of each `read` of a file-like reader."""
WARM_UP = "warm-up"
"""Prefix of a small object that is read without faults."""
WARM_UP_BYTES = 4096
NUM_RANGES = 4
"""Number of ranges, for calls that read an object in several ranges."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """One read of one object."""

    library: str
    """"aioflux" for a call in `OURS`, "peers" for a call in `PEERS`."""
    call: str
    """Name of the call in this table."""
    url: str
    """Root url of the server."""
    bucket: str
    """Bucket of the object."""
    prefix: str
    """Prefix of the object; it has no other objects."""
    size_bytes: int
    """Size of the object, in bytes."""

    @property
    def key(self) -> str:
        """Key of the object."""
        return f"{self.prefix}/object"


@dataclass(frozen=True)
class Call:
    """How a library reads one object."""

    read: Callable[..., Any]
    """Function that reads the object and returns its bytes."""
    start: int = 0
    """Position of the first byte that the call reads."""
    is_one_request: bool = False
    """Whether the library reads the whole object in one request."""


def _run(work: Awaitable[Any]) -> Any:
    kept: list[Any] = []

    async def keep() -> None:
        kept.append(await work)

    # Do not return the bytes from the task: when asyncio.Runner restores the SIGINT handler, it
    # formats the task with its result in an error message, which takes 16 s for 64 MiB.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(keep())
    return kept[0]


# --- aioflux -----------------------------------------------------------------------------------


def _awaited(body: Callable[[aioflux.Store, Read], Awaitable[Any]]) -> Callable[..., Any]:
    def read(read: Read, **options: Any) -> Any:
        import aioflux

        async def run() -> Any:
            uri = f"gs://{read.bucket}/{read.prefix}"
            options.setdefault("transfer", aioflux.TransferOptions(verify_ranges=True))
            async with aioflux.open_store(uri, endpoint_url=read.url, **options) as store:
                return await body(store, read)

        return _run(run())

    return read


async def _get(store: aioflux.Store, read: Read) -> bytes:
    return await store.get("object")


async def _get_range(store: aioflux.Store, read: Read) -> bytes:
    return await store.get_range("object", start=1, end=read.size_bytes)


async def _get_into(store: aioflux.Store, read: Read) -> bytearray:
    buffer = bytearray(read.size_bytes)
    count = await store.get_into("object", buffer)
    return buffer[:count]


async def _get_many(store: aioflux.Store, read: Read) -> bytes:
    [(_, data)] = [pair async for pair in store.get_many(["object"])]
    return data


async def _open_reader(store: aioflux.Store, read: Read) -> bytes:
    pieces: list[bytes] = []
    async with store.open_reader("object") as reader:
        while piece := await reader.read(STEP_BYTES):
            pieces.append(piece)
    return b"".join(pieces)


def _sync(read: Read, **options: Any) -> bytes:
    from aioflux import sync

    uri = f"gs://{read.bucket}/{read.prefix}"
    store: sync.Store
    with sync.open_store(uri, endpoint_url=read.url, **options) as store:
        return store.get("object")


def _map_dataset(read: Read, **options: Any) -> bytes:
    from aioflux.data import MapDataset

    return MapDataset(f"gs://{read.bucket}/{read.prefix}", endpoint_url=read.url, **options)[0].data


def _iterable_dataset(read: Read, **options: Any) -> bytes:
    from aioflux.data import IterableDataset

    [sample] = IterableDataset(
        f"gs://{read.bucket}/{read.prefix}", endpoint_url=read.url, **options
    )
    return sample.data


OURS: dict[str, Call] = {
    "get": Call(_awaited(_get)),
    "get_range": Call(_awaited(_get_range), start=1),
    "get_into": Call(_awaited(_get_into)),
    "get_many": Call(_awaited(_get_many)),
    "open_reader": Call(_awaited(_open_reader)),
    "sync get": Call(_sync),
    "MapDataset": Call(_map_dataset),
    "IterableDataset": Call(_iterable_dataset),
}

# --- peers -------------------------------------------------------------------------------------


def _gcsfs(read: Read) -> tuple[Any, str]:
    # Read when gcsfs is imported. Without it, gcsfs requests the type of the bucket over gRPC, and
    # waits for a minute.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    import gcsfs

    filesystem = gcsfs.GCSFileSystem(
        token="anon",  # noqa: S106  no secret
        endpoint_url=read.url,
        cache_timeout=0,
    )
    return filesystem, f"{read.bucket}/{read.key}"


def _gcsfs_open(read: Read) -> bytes:
    filesystem, path = _gcsfs(read)
    with filesystem.open(path, "rb", block_size=16 * MIB) as file:
        return b"".join(iter(lambda: file.read(STEP_BYTES), b""))


def _gcsfs_cat_file(read: Read) -> bytes:
    filesystem, path = _gcsfs(read)
    return bytes(filesystem.cat_file(path))


def _gcsfs_cat_ranges(read: Read) -> bytes:
    filesystem, path = _gcsfs(read)
    starts = list(_starts(read))
    ends = [start + read.size_bytes // NUM_RANGES for start in starts]
    paths = [path] * NUM_RANGES
    return b"".join(filesystem.cat_ranges(paths, starts, ends, on_error="raise"))


def _starts(read: Read) -> Iterator[int]:
    return iter(range(0, read.size_bytes, read.size_bytes // NUM_RANGES))


def _google(read: Read) -> Any:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(
        project="perf",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": read.url},
    )
    return client.bucket(read.bucket).blob(read.key)


def _google_download(read: Read) -> bytes:
    return bytes(_google(read).download_as_bytes())


def _google_open(read: Read) -> bytes:
    with _google(read).open("rb", chunk_size=16 * MIB) as file:
        return b"".join(iter(lambda: file.read(STEP_BYTES), b""))


def _obstore(read: Read) -> Any:
    from obstore.store import GCSStore

    return GCSStore(
        read.bucket,
        config={"base_url": read.url, "bearer_token": "none", "skip_signature": True},
        client_options={"allow_http": True},
    )


def _obstore_get(read: Read) -> bytes:
    return bytes(_obstore(read).get(read.key).bytes())


def _obstore_get_range(read: Read) -> bytes:
    store = _obstore(read)
    length = read.size_bytes // NUM_RANGES

    async def run() -> list[Any]:
        return await asyncio.gather(
            *(
                store.get_range_async(read.key, start=start, length=length)
                for start in _starts(read)
            )
        )

    return b"".join(map(bytes, _run(run())))


def _obstore_open_reader(read: Read) -> bytes:
    import obstore

    reader = obstore.open_reader(_obstore(read), read.key, buffer_size=16 * MIB)
    written = io.BytesIO()
    while piece := reader.read(STEP_BYTES):
        written.write(bytes(piece))
    return written.getvalue()


def _gcloud_aio(read: Read) -> bytes:
    import aiohttp
    from gcloud.aio.storage import Storage

    async def run() -> bytes:
        async with aiohttp.ClientSession() as session:
            storage = Storage(session=session, api_root=read.url)
            return bytes(await storage.download(read.bucket, read.key))

    return bytes(_run(run()))


PEERS: dict[str, Call] = {
    "gcsfs `open().read`": Call(_gcsfs_open),
    "gcsfs `cat_file`": Call(_gcsfs_cat_file, is_one_request=True),
    "gcsfs `cat_ranges`, 4": Call(_gcsfs_cat_ranges),
    "google `download_as_bytes`": Call(_google_download, is_one_request=True),
    'google `blob.open("rb")`': Call(_google_open),
    "obstore `get`": Call(_obstore_get, is_one_request=True),
    "obstore `get_range`, 4 gathered": Call(_obstore_get_range),
    "obstore `open_reader`": Call(_obstore_open_reader),
    "gcloud-aio `download`": Call(_gcloud_aio, is_one_request=True),
}


def main() -> None:
    """Do the read that the first argument describes."""
    read = Read(**json.loads(sys.argv[1]))
    call = (OURS if read.library == "aioflux" else PEERS)[read.call]
    result: dict[str, Any] = {**asdict(read), "error": None, "digest": None}
    # A warm-up, so that imports and caches are not measured.
    call.read(replace(read, prefix=WARM_UP, size_bytes=WARM_UP_BYTES))
    begun = time.perf_counter()
    try:
        data = call.read(read)
        result["seconds"] = time.perf_counter() - begun
        result["digest"] = hashlib.sha256(data).hexdigest()
    except Exception as exc:
        result["seconds"] = time.perf_counter() - begun
        result["error"] = type(exc).__name__
        result["message"] = str(exc)[:500]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

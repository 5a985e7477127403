"""A dataset as `write_objects` leaves it, and the tools that copy it."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from aioflux import Listing, sync
from tests.command import run_command
from tests.servers.process import find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux.testing import GCSServer

__all__ = [
    "COPIES",
    "MANIFEST",
    "blobs_below",
    "data_key",
    "run_aioflux",
    "run_rclone",
    "write_dataset",
]

MANIFEST = "aioflux-manifest"


def data_key(write: int, task: int, attempt: int = 0) -> str:
    """Return the name of a data object."""
    return f"data-{write:032x}-{task:05d}-{attempt:08x}-00000.jsonl"


def write_dataset(store: sync.Store, write: int = 1, num_objects: int = 4) -> list[dict[str, int]]:
    """Write data objects and their manifest, and return the rows."""
    rows = [{"n": number} for number in range(num_objects)]
    metas = [
        store.put(data_key(write, number), f'{{"n": {number}}}\n'.encode())
        for number in range(num_objects)
    ]
    store.put(MANIFEST, Listing(metas).to_bytes(is_relative=True))
    return rows


def run_aioflux(server: GCSServer, *arguments: str) -> None:
    assert run_command([*arguments, "--endpoint-url", server.url]) == 0


def run_rclone(server: GCSServer, command: str, *uris: str) -> str:
    """Run rclone, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
    remote = {
        "TYPE": "google cloud storage",
        "ENDPOINT": f"{server.url}/storage/v1/",
        "ANONYMOUS": "true",
        "NO_CHECK_BUCKET": "true",
    }
    env |= {f"RCLONE_CONFIG_GS_{name}": value for name, value in remote.items()}
    env["RCLONE_CONFIG"] = os.devnull
    paths = (uri.removeprefix("file://").replace("gs://", "gs:") for uri in uris)
    arguments = [find_program("rclone"), *command.split(), *paths]
    return subprocess.run(arguments, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def blobs_below(server: GCSServer, uri: str) -> Iterator[tuple[storage.Client, list[storage.Blob]]]:
    """Yield a client of google-cloud-storage, and the blobs that it lists below a uri."""
    options: Any = {"api_endpoint": server.url}
    client = storage.Client("project", AnonymousCredentials(), client_options=options)
    bucket_name, _, prefix = uri.removeprefix("gs://").partition("/")
    yield client, list(client.list_blobs(bucket_name, prefix=f"{prefix}/"))
    client.close()


def _copy_by_aioflux(server: GCSServer, source: str, target: str) -> None:
    """Copy with `aioflux cp -r`."""
    run_aioflux(server, "cp", "-r", source, target.removeprefix("file://"))


def _copy_by_google_cloud_storage(server: GCSServer, source: str, target: str) -> None:
    """Copy each blob on the service, or download it."""
    prefix = source.removeprefix("gs://").partition("/")[2]
    with blobs_below(server, source) as (client, blobs):
        for blob in blobs:
            name = blob.name.removeprefix(f"{prefix}/")
            if target.startswith("file://"):
                path = Path(target.removeprefix("file://"), name)
                path.parent.mkdir(parents=True, exist_ok=True)
                blob.download_to_filename(path)
            else:
                to_bucket, _, to_prefix = target.removeprefix("gs://").partition("/")
                blob.bucket.copy_blob(blob, client.bucket(to_bucket), f"{to_prefix}/{name}")


def _copy_by_rclone(server: GCSServer, source: str, target: str) -> None:
    """Copy with `rclone copy`."""
    run_rclone(server, "copy", source, target)


COPIES: dict[str, Callable[[GCSServer, str, str], None]] = {
    "aioflux": _copy_by_aioflux,
    "google-cloud-storage": _copy_by_google_cloud_storage,
    "rclone": _copy_by_rclone,
}
"""Tools that copy all objects below a uri to another uri."""

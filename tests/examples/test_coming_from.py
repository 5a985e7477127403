"""Both columns of the tables in docs/coming-from.md run as they are written."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing import GCSServer
from tests.servers.moto import Moto

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def columns() -> dict[str, list[list[str]]]:
    """Return both columns of the table below each heading."""
    sections = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        rows = re.findall(r"^\| [^|]+ \| `([^|]+)` \| `([^|]+)` \|$", body, re.MULTILINE)
        found[heading] = [list(column) for column in zip(*rows, strict=True)]
    return found


COLUMNS = columns()


def run(lines: list[str], namespace: dict[str, Any]) -> None:
    for line in lines:
        exec(compile(line, "coming-from.md", "exec"), namespace)


def fill(store: aioflux.sync.Store) -> None:
    store.put("a", b"0123456789")
    store.put_many((f"train/{number}", b"data") for number in range(3))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
        with aioflux.sync.open_store("gs://bucket") as store:
            fill(store)
        yield running


@pytest.mark.parametrize(
    "heading", ["google-cloud-storage", "boto3", "obstore", "gcsfs and s3fs"], ids=str
)
def test_the_column_of_aioflux_runs(heading: str, server: GCSServer) -> None:
    with aioflux.sync.open_store("gs://bucket") as store:
        run(COLUMNS[heading][1], {"aioflux": aioflux, "store": store})


def test_the_column_of_google_runs(server: GCSServer) -> None:
    from google.cloud import storage

    names = {"ThreadPoolExecutor": ThreadPoolExecutor, "Blob": storage.Blob, "storage": storage}
    run(COLUMNS["google-cloud-storage"][0], names)


def test_the_column_of_obstore_runs(server: GCSServer) -> None:
    import obstore.store

    options = {
        "base_url": server.url,
        "bearer_token": "x",
        "client_options": {"allow_http": True},
    }
    run(COLUMNS["obstore"][0], {"obstore": obstore, "options": options})


def test_the_column_of_gcsfs_runs(server: GCSServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Read at import: otherwise gcsfs asks for the kind of a bucket over gRPC.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    run(COLUMNS["gcsfs and s3fs"][0], {"gcsfs": gcsfs})


@pytest.mark.more
def test_the_column_of_boto3_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    with Moto() as server:
        server.sign_in(monkeypatch)
        with aioflux.sync.open_store("s3://bucket") as store:
            fill(store)
        client = boto3.client("s3", endpoint_url=server.url)
        run(COLUMNS["boto3"][0], {"client": client, "io": io})

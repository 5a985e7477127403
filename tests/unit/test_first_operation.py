"""The first operation of a process imports no cloud SDK and no second HTTP client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

BUDGET = 260
"""Modules beyond those of a bare interpreter: 211 to 236 on CPython 3.11, of which asyncio brings
111; the rest is for what other versions of Python split off. It was 507 with the SDKs."""

HEAVY = [
    "aiohttp",
    "azure",
    "botocore",
    "cryptography",
    "email",
    "gcloud",
    "google.auth",
    "google.oauth2",
    "importlib.metadata",
    "jwt",
    "numpy",
    "pydantic",
    "requests",
    "rich",
    "torch",
    "typer",
    "urllib.request",
    "urllib3",
    "yarl",
]

PROBE = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import asyncio
import aioflux

async def first(uri, url, operation):
    async with aioflux.open_store(uri, endpoint_url=url or None) as store:
        if operation != "get" or not url:
            await store.put("other", b"data")
        if operation == "get":
            assert await store.get("key" if url else "other") == b"data"
        elif operation == "list":
            assert len(await store.list_all("")) >= 1
        elif operation == "head":
            assert (await store.head("key")).size == 4
        elif operation == "open_reader":
            async with store.open_reader("key") as reader:
                assert await reader.read() == b"data"
        elif operation == "delete":
            await store.delete("other")
        elif operation == "permissions":
            assert await store.missing_permissions(["storage.objects.get"]) == []
        elif operation == "compose":
            await store.compose("other", ["key"])

uri, url, operation = sys.argv[2:]
if operation == "sync":
    with aioflux.sync.open_store(uri, endpoint_url=url) as store:
        assert store.get("key") == b"data"
else:
    asyncio.run(first(uri, url, operation))
import json
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    """It has the XML API, so that it also serves `s3://`."""
    with GCSServer(buckets=["bucket"]) as server:
        server.put("bucket", "key", b"data")
        yield server


def environment() -> dict[str, str]:
    """Return an environment with keys of AWS, and without other settings of a cloud or a proxy."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("AWS_", "GOOGLE_", "STORAGE_"))
        and not name.lower().endswith("_proxy")
    }
    return {
        **plain,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull + "/none",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull + "/none",
    }


def loaded(uri: str, url: str, operation: str) -> list[str]:
    """Return the modules that a fresh process has loaded after one operation."""
    command = [sys.executable, "-c", PROBE, str(ROOT), uri, url, operation]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment(), cwd="/"
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def is_heavy(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in HEAVY)


@pytest.mark.parametrize(
    ("scheme", "operation"),
    [
        *(("gs", name) for name in ("get", "list", "put", "sync", "head", "open_reader")),
        *(("gs", name) for name in ("delete", "permissions")),
        *(("s3", name) for name in ("get", "list", "put", "sync")),
    ],
)
def test_the_first_operation_on_a_server_is_light(
    scheme: str, operation: str, server: GCSServer
) -> None:
    modules = loaded(f"{scheme}://bucket", server.url, operation)
    assert [module for module in modules if is_heavy(module)] == []
    assert len(modules) <= BUDGET, modules


@pytest.mark.parametrize("operation", ["get", "list", "put"])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_the_first_operation_without_a_server_is_light(
    scheme: str, operation: str, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}" if scheme == "file" else "memory://bucket"
    modules = loaded(uri, "", operation)
    assert [module for module in modules if is_heavy(module)] == []
    assert len(modules) <= BUDGET, modules


def test_gcloud_aio_comes_with_the_first_compose(server: GCSServer) -> None:
    """The other direction: without this, a probe that runs nothing would pass."""
    modules = loaded("gs://bucket", server.url, "compose")
    assert {"aiohttp", "gcloud.aio.storage"} <= set(modules)

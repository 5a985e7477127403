"""The command line on az://, as on other services."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

import aioflux.sync
from tests.command import run_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.azurite import Azurite


@pytest.fixture
def root(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to write; the environment tells how to sign in."""
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={azurite.account};AccountKey={azurite.key};"
        f"BlobEndpoint={azurite.url}/{azurite.account}",
    )
    return f"az://{azurite.account}/container/{uuid.uuid4().hex}"


@pytest.fixture
def keys(root: str) -> list[str]:
    """Keys of a data set."""
    keys = [f"{at:02}" for at in range(20)]
    with aioflux.sync.open_store(f"{root}/data") as store:
        store.put_many((key, key.encode()) for key in keys)
    return keys


def test_the_command_line_copies_and_removes(
    root: str, keys: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["cp", "-r", f"{root}/data", f"{tmp_path}/data"]) == 0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == keys
    assert run_command(["cp", f"{root}/data/07", f"{root}/seven"]) == 0
    capfd.readouterr()
    assert run_command(["ls", f"{root}/"]) == 0
    assert capfd.readouterr().out.split() == [f"{root}/data/", f"{root}/seven"]
    assert run_command(["clean", root]) == 0
    assert run_command(["rm", "-r", f"{root}/"]) == 0
    with aioflux.sync.open_store(root) as store:
        assert store.list_all() == []


def test_the_command_reads_public_containers(
    azurite: Azurite, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"c{uuid.uuid4().hex}"
    with azurite.client() as client:
        client.create_container(name, public_access="container").upload_blob("a", b"1")
    options = ["--anonymous", "--endpoint-url", azurite.url]
    assert run_command(["cat", *options, f"az://{azurite.account}/{name}/a"]) == 0
    assert capfd.readouterr().out == "1"

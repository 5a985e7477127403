"""verify, copy and clean by uri, for blocking callers."""

from __future__ import annotations

import asyncio

import pytest

from aioflux import checkpoint, open_store
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError
from tests.checkpoint.saves import save_id, save_step

pytestmark = pytest.mark.clouds("gs", "s3", "az")


def on(uri, act):
    async def work():
        async with open_store(uri) as store:
            return await act(store)

    return asyncio.run(work())


@pytest.fixture
def run(server):
    async def fill(store):
        return [await save_step(store, step) for step in (1, 2, 3)]

    return on(f"{server.root}/run", fill)


def test_a_checkpoint_is_verified(run, server) -> None:
    assert checkpoint.verify(f"{server.root}/run/step-00000002", deep=True).is_valid
    server.put("bucket", f"run/{run[1].keys[0]}", b"")
    found = checkpoint.verify(f"{server.root}/run/step-00000002/", endpoint_url=server.url)
    assert [problem.kind for problem in found.problems] == ["size"]


def test_a_run_is_copied_to_disk_and_within_the_bucket(run, server, tmp_path) -> None:
    disk = tmp_path.as_uri()
    copied = checkpoint.copy(f"{server.root}/run", disk, endpoint_url=server.url)
    assert [each.step for each in copied] == [1, 2, 3]
    [one] = checkpoint.copy(f"{disk}/step-00000003", f"{server.root}/one")
    assert one.uri == f"{server.root}/one/"
    assert checkpoint.verify(one.uri, deep=True).is_valid
    [back] = checkpoint.copy(f"{server.root}/run/", f"{server.root}/again", steps=[2])
    assert checkpoint.verify(back.uri, deep=True).is_valid
    with pytest.raises(ValueError, match="one checkpoint"):
        checkpoint.copy(f"{server.root}/one", f"{server.root}/two", steps=[3])


def test_what_cannot_be_copied_is_raised_when_the_rest_is(run, server) -> None:
    for saved in run[:2]:
        server.put("bucket", f"run/{saved.keys[0]}", b"")
    with pytest.raises(CheckpointCorruptError, match="step-00000001") as caught:
        checkpoint.copy(f"{server.root}/run", f"{server.root}/copy")
    assert "step-00000002" in caught.value.__notes__[0]
    assert checkpoint.verify(f"{server.root}/copy/step-00000003").is_valid
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.copy(f"{server.root}/none", f"{server.root}/copy")


def test_what_killed_saves_left_is_cleaned(run, server) -> None:
    key = f"run/step-00000009/{save_id(9)}/__0_0.distcp"
    server.put("bucket", key, b"")
    assert checkpoint.clean(server.root).removed == ()
    assert checkpoint.clean(server.root, older_than_seconds=0, dry_run=True).removed == (key,)
    done = checkpoint.clean(f"{server.root}/run", older_than_seconds=0)
    assert done.removed == (key.removeprefix("run/"),)
    assert checkpoint.clean(server.root, older_than_seconds=0).removed == ()

"""What stands on stores works on `s3://` as on `gs://`: datasets, checkpoints, the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

import aioflux
from aioflux import NotFoundError, TransferOptions
from aioflux.checkpoint import Checkpointer, load, open_reader, open_writer, save
from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from aioflux.data import IterableDataset, MapDataset
from tests.checkpoint.test_torch import assert_equal, state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3.conftest import Prefix

MIB = 1024 * 1024
SMALL = TransferOptions(part_size_bytes=5 * MIB, range_size_bytes=MIB, max_buffered_bytes=10 * MIB)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_datasets_give_every_object_once(prefix: Prefix, num_workers: int) -> None:
    objects = prefix.fill(30)
    mapped = MapDataset(prefix.uri)
    loader = DataLoader(mapped, batch_size=7, num_workers=num_workers, collate_fn=list)
    assert [sample.key for batch in loader for sample in batch] == sorted(objects)
    streamed = IterableDataset(prefix.uri, shuffle=True, seed=0)
    loader = DataLoader(streamed, batch_size=7, num_workers=num_workers, collate_fn=list)
    assert {sample.key: bytes(sample.data) for batch in loader for sample in batch} == objects


def test_an_object_that_was_replaced_since_it_was_listed_fails_its_batch(prefix: Prefix) -> None:
    prefix.fill(3)
    mapped = MapDataset(prefix.uri)
    assert len(mapped) == 3
    prefix.put("001", b"other")
    with pytest.raises(NotFoundError, match="001"):
        mapped[1]


@pytest.mark.parametrize("num_elements", [1000, 700_000], ids=["one-request", "parts"])
def test_a_state_comes_back_equal(prefix: Prefix, num_elements: int) -> None:
    saved = state(num_elements)
    save(saved, f"{prefix.uri}/model.pt", transfer=SMALL)
    assert_equal(saved, load(f"{prefix.uri}/model.pt", transfer=SMALL))


def test_torch_writes_and_reads_streams(prefix: Prefix) -> None:
    saved = state(1000)
    with open_writer(f"{prefix.uri}/model.pt") as writer:
        torch.save(saved, writer)
    with open_reader(f"{prefix.uri}/model.pt") as reader:
        assert_equal(saved, torch.load(reader, weights_only=True))


def test_a_checkpointer_keeps_the_last_steps(prefix: Prefix) -> None:
    saved = {"weights": torch.arange(1000.0), "step": 1}
    with Checkpointer(f"{prefix.uri}/run", keep_last=2, transfer=SMALL) as checkpointer:
        checkpointer.save(1, saved)
        checkpointer.save_async(2, saved).result(timeout=60)
        checkpointer.save(3, saved)
        assert list(checkpointer.steps()) == [2, 3]
        assert checkpointer.verify(3)
        assert_equal(saved, checkpointer.load())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints(prefix: Prefix) -> None:
    uri = f"{prefix.uri}/dcp"
    saved = {"weights": torch.arange(300_000.0), "bias": torch.ones(7)}
    dcp.save(saved, storage_writer=StorageWriter(uri), no_dist=True)
    loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load(loaded, storage_reader=StorageReader(uri), no_dist=True)
    assert_equal(saved, loaded)


async def test_clean_ends_the_uploads_of_the_dead(prefix: Prefix) -> None:
    prefix.server.door().create_multipart_upload(Bucket="bucket", Key=f"{prefix.name}/left")
    async with aioflux.open_store(prefix.uri) as store:
        found = await store.clean(older_than_seconds=0, dry_run=True)
        assert [upload.key for upload in found.aborted] == ["left"]
        result = await store.clean(older_than_seconds=0)
        assert [upload.key for upload in result.aborted] == ["left"]
        assert (await store.clean(older_than_seconds=0)).aborted == ()


async def test_many_are_deleted_and_what_was_missing_is_told(prefix: Prefix) -> None:
    objects = prefix.fill(25)
    async with aioflux.open_store(prefix.uri) as store:
        metas = await store.list_all()
        prefix.put("003", b"other")
        result = await store.delete_many([*metas, "none"])
        assert set(result.errors) == {"003"}
        assert isinstance(result.errors["003"], aioflux.PreconditionFailedError)
        assert result.missing == ("none",)
        assert set(result.deleted) == objects.keys() - {"003"}
    assert prefix.keys() == ["003"]


async def test_anybody_reads_a_public_bucket(prefix: Prefix) -> None:
    key = f"{prefix.name}/a"
    prefix.server.door().put_object(Bucket="public", Key=key, Body=b"1")
    anybody = aioflux.S3Access(anonymous=True)
    async with aioflux.open_store("s3://public", credentials=anybody) as store:
        assert await store.get(key) == b"1"
        assert [pair async for pair in store.get_many([key] * 3)] == [(key, b"1")] * 3
        with pytest.raises(aioflux.PermissionDeniedError, match="s3:PutObject"):
            await store.put(key, b"2")


async def test_keys_that_do_not_match_are_refused(prefix: Prefix) -> None:
    wrong = aioflux.S3Access(credentials=lambda: (prefix.server.access_key, "wrong"))
    async with aioflux.open_store(prefix.uri, credentials=wrong) as store:
        with pytest.raises(aioflux.PermissionDeniedError, match="the secret key does not belong"):
            await store.get("a")


def test_the_command_takes_uris_of_s3(
    prefix: Prefix, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from aioflux.cli._app import run_app

    source = tmp_path / "in"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(b"1")
    (source / "d" / "b").write_bytes(b"22")
    assert run_app(["cp", "-r", f"{source}", f"{prefix.uri}/up"]) == 0
    assert prefix.keys() == ["up/a", "up/d/b"]
    assert run_app(["ls", f"{prefix.uri}/up/"]) == 0
    assert "up/a" in capfd.readouterr().out
    assert run_app(["cp", "-r", f"{prefix.uri}/up", f"{tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "d" / "b").read_bytes() == b"22"
    assert run_app(["rm", "-r", f"{prefix.uri}/up"]) == 0
    assert prefix.keys() == []
    assert run_app(["clean", prefix.uri]) == 0
    assert run_app(["ls", "--anonymous", "file:///tmp"]) != 0
    assert "--anonymous has an effect on gs://, s3://" in capfd.readouterr().err


async def test_a_large_object_is_verified_without_being_read_twice(prefix: Prefix) -> None:
    """Listings and ranges tell no checksum: `head` does."""
    options = TransferOptions(range_size_bytes=MIB)
    data = bytes(range(256)) * (12 * 1024)  # 3 MiB
    async with aioflux.open_store(prefix.uri, transfer=options) as store:
        await store.put("a", data)
        [meta] = await store.list_all()
        assert meta.crc32c is None
        before = store.stats
        assert await store.get(meta) == data
        after = store.stats
        assert after.num_requests - before.num_requests == 4
        assert after.bytes_received - before.bytes_received == len(data)
        assert await store.get("a") == data
        assert store.stats.bytes_received - after.bytes_received == len(data)


@pytest.mark.parametrize("checksums", [True, False])
async def test_wrong_bytes_of_a_large_object_are_noticed(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch, *, checksums: bool
) -> None:
    """By the checksum that `head` tells, or by reading twice."""
    options = TransferOptions(range_size_bytes=MIB)
    data = bytes(3 * MIB)
    access = aioflux.S3Access(checksums=checksums)
    async with aioflux.open_store(prefix.uri, transfer=options, credentials=access) as store:
        await store.put("a", data)
        [meta] = await store.list_all()
        [session] = store.sessions.values()
        plain, wrong = session.service.get, iter([True])

        async def flipped(key: str, **asked: Any) -> Any:
            body = await plain(key, **asked)
            if asked["start"] and next(wrong, False):
                memoryview(body.data)[0] = 1
            return body

        monkeypatch.setattr(session.service, "get", flipped)
        assert await store.get(meta) == data

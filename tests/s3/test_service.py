"""Uploads, batch deletes, public buckets and checksums of `s3://`, and the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import TransferOptions
from aioflux.testing.faults import Fault, FlakyStore
from tests.command import run_command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3.conftest import Prefix

MIB = 1024 * 1024


async def test_clean_ends_the_uploads_of_the_dead(prefix: Prefix) -> None:
    prefix.server.door().create_multipart_upload(Bucket="bucket", Key=f"{prefix.name}/left")
    async with aioflux.open_store(prefix.uri) as store:
        found = await store.clean(older_than_seconds=0, dry_run=True)
        assert [upload.key for upload in found.aborted] == ["left"]
        result = await store.clean(older_than_seconds=0)
        assert [upload.key for upload in result.aborted] == ["left"]
        assert (await store.clean(older_than_seconds=0)).aborted == ()


async def test_many_are_deleted_and_what_was_missing_is_reported(prefix: Prefix) -> None:
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


async def test_anonymous_reads_of_a_public_bucket(prefix: Prefix) -> None:
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
    source = tmp_path / "in"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(b"1")
    (source / "d" / "b").write_bytes(b"22")
    assert run_command(["cp", "-r", f"{source}", f"{prefix.uri}/up"]) == 0
    assert prefix.keys() == ["up/a", "up/d/b"]
    assert run_command(["ls", f"{prefix.uri}/up/"]) == 0
    assert "up/a" in capfd.readouterr().out
    assert run_command(["cp", "-r", f"{prefix.uri}/up", f"{tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "d" / "b").read_bytes() == b"22"
    assert run_command(["rm", "-r", f"{prefix.uri}/up"]) == 0
    assert prefix.keys() == []
    assert run_command(["clean", prefix.uri]) == 0
    assert run_command(["ls", "--anonymous", "file:///tmp"]) != 0
    assert "--anonymous needs a gs://, s3://" in capfd.readouterr().err


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
    prefix: Prefix, *, checksums: bool
) -> None:
    """By the checksum that `head` returns, or by reading twice."""
    options = TransferOptions(range_size_bytes=MIB, verify_ranges=not checksums)
    data = bytes(3 * MIB)
    access = aioflux.S3Access(checksums=checksums)
    faults = iter([None, Fault(kind="flip")])

    def draw(operation: str) -> Fault | None:
        return next(faults, None) if operation == "get" else None

    async with FlakyStore(
        prefix.uri,
        draw=draw,
        transfer=options,
        retry=aioflux.RetryPolicy(),
        timeouts=aioflux.Timeouts(),
        credentials=access,
    ) as store:
        await store.put("a", data)
        [meta] = await store.list_all()
        assert await store.get(meta) == data
        assert next(faults, None) is None

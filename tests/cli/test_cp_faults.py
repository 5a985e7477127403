"""`aioflux cp`: standard streams, progress, and sources that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from aioflux.cli._cp.copier import Copier
from aioflux.cli._cp.local_files import FileThreads, LocalFiles
from aioflux.cli._cp.objects import StandardStreams, StoreObjects
from aioflux.cli._cp.plan import LARGE_BYTES, CopyJob
from aioflux.cli._output import Report
from aioflux.cli._progress import Progress, amount
from aioflux.errors import ChecksumError
from tests.cli.conftest import FAR_SECONDS, PROGRAM, read_files, write_files
from tests.cli.test_cp import TREE, fill
from tests.cli.test_process import Terminal

MIB = 1024 * 1024


def test_an_object_that_is_damaged_does_not_arrive(aioflux, bucket, cli_server) -> None:
    """Its bytes do not match the crc32c that was listed; the others arrive."""
    fill(bucket)
    with cli_server.faults.inject("objects.media", bucket=bucket.name, key="a", flip_at=0):
        ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert "crc32c" in ended.err
    assert sorted(read_files(Path("out"))) == sorted(set(TREE) - {"a"})


class DamagedSource:
    """A source whose large object fails verification, the first times that it is read."""

    def __init__(self, times: int) -> None:
        self.num_reads = 0
        self._times = times

    async def read_many(self, jobs):
        raise NotImplementedError(jobs)

    async def pieces(self, job):
        self.num_reads += 1
        is_damaged = self.num_reads <= self._times
        yield b"wrong" if is_damaged else b"right"
        if is_damaged:
            raise ChecksumError("it is damaged", uri=job.source)


@pytest.mark.parametrize(
    ("times", "num_reads", "found"),
    [(0, 1, {"k": b"right"}), (2, 3, {"k": b"right"}), (3, 3, {})],
    ids=["never", "twice", "always"],
)
async def test_a_large_object_is_read_three_times(tmp_path, times, num_reads, found) -> None:
    path = str(tmp_path / "k")

    async def jobs():
        yield CopyJob("gs://b/k", path, "", path, LARGE_BYTES + 1)

    source, progress, report = DamagedSource(times), Progress(), Report()
    files = LocalFiles(FileThreads(), no_clobber=False)
    await Copier(source, files, progress, report).run(jobs())
    assert source.num_reads == num_reads
    assert read_files(tmp_path) == found
    assert report.num_failed == (not found)
    assert progress.num_bytes == (LARGE_BYTES + 1 if found else 0)


async def test_standard_output_gets_no_byte_twice(capfd) -> None:
    async def jobs():
        yield CopyJob("gs://b/k", "standard output", "", "", LARGE_BYTES + 1)

    source, report = DamagedSource(1), Report()
    await Copier(source, StandardStreams(), Progress(), report).run(jobs())
    assert (source.num_reads, report.num_failed) == (1, 1)
    assert capfd.readouterr().out == "wrong"


@pytest.mark.parametrize("size", [1000, 20 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("is_local", [True, False], ids=["disk", "bucket"])
def test_a_byte_that_is_flipped_once_is_read_again(
    aioflux, bucket, cli_server, is_local, size
) -> None:
    data = os.urandom(size)
    bucket.put("k", data)
    cli_server.create_bucket(f"{bucket.name}-2")
    target = "out" if is_local else f"gs://{bucket.name}-2/k"
    before = cli_server.faults.injected["flip"]
    with cli_server.faults.inject("objects.media", bucket=bucket.name, flip_at=7, times=1):
        ended = aioflux("cp", f"{bucket.uri}/k", target)
    assert cli_server.faults.injected["flip"] == before + 1
    assert ended.status == 0
    assert ended.err.startswith("copied 1 object, ")
    is_same = data == (Path("out").read_bytes() if is_local else cli_server.get(target[5:-2], "k"))
    assert is_same


def test_a_large_object_that_is_damaged_leaves_nothing(aioflux, bucket, cli_server) -> None:
    bucket.put("k", b"x" * 20 * MIB)
    with cli_server.faults.inject("objects.media", bucket=bucket.name, flip_at=7):
        ended = aioflux("cp", "-r", bucket.uri, "out")
        assert ended.status == 1
        assert "crc32c" in ended.err
        assert ended.err.splitlines()[-1].startswith("copied 0 objects, 0 B in ")
        assert not Path("out").exists()
        assert aioflux("cp", f"{bucket.uri}/k", "-").status == 1


def test_an_object_that_is_deleted_meanwhile_is_named(aioflux, bucket) -> None:
    fill(bucket)
    ended = aioflux("cp", f"{bucket.uri}/none", f"{bucket.uri}/a", "out/")
    assert ended.status == 1
    assert f"{bucket.uri}/none" in ended.err
    assert read_files(Path("out")) == {"a": b"1"}


def test_standard_streams(command, bucket, tmp_path) -> None:
    data = os.urandom(20 * MIB)
    ended = command("cp", "-", f"{bucket.uri}/k", stdin=data)
    assert ended.returncode == 0, ended.stderr
    assert bucket.get("k") == data
    ended = command("cp", f"{bucket.uri}/k", "-")
    assert (ended.returncode, ended.stdout == data, ended.stderr) == (0, True, b"")
    path = tmp_path / "file"
    assert command("cp", "-", path, stdin=b"123").returncode == 0
    assert path.read_bytes() == b"123"


def test_standard_output_takes_one_source_after_the_other(command, bucket, tmp_path) -> None:
    """Small and large ones, of every origin: in the order of the arguments."""
    contents = [bytes([65 + at]) * size for at, size in enumerate([9, 17 * MIB, 17 * MIB, 8, 7, 6])]
    paths = [tmp_path / str(at) for at in range(3)]
    for path, data in zip(paths, contents, strict=False):
        path.write_bytes(data)
    bucket.put("3", contents[3])
    bucket.put("5", contents[5])
    ended = command("cp", *paths, f"{bucket.uri}/3", "-", f"{bucket.uri}/5", "-", stdin=contents[4])
    assert (ended.returncode, ended.stderr) == (0, b"")
    is_same = ended.stdout == b"".join(contents)
    assert is_same


def test_a_source_that_fails_does_not_stop_the_others_to_standard_output(aioflux, bucket) -> None:
    fill(bucket)
    ended = aioflux("cp", f"{bucket.uri}/a", f"{bucket.uri}/none", f"{bucket.uri}/d/b", "-")
    assert (ended.status, ended.out) == (1, "12")
    assert f"{bucket.uri}/none" in ended.err


def test_standard_input_has_the_media_type_of_its_target(command, bucket) -> None:
    assert command("cp", "-", f"{bucket.uri}/x.json", stdin=b"{}").returncode == 0
    output = command("stat", "--json", f"{bucket.uri}/x.json").stdout
    assert json.loads(output)["content_type"] == "application/json"


def test_a_dry_run_that_is_stopped_copied_nothing(environment, bucket) -> None:
    """Stopped while its output is not read, which is more than a pipe holds."""
    for at in range(3000):
        bucket.put(f"{at:05}")
    with subprocess.Popen(
        [*PROGRAM, "cp", "-r", "--dry-run", bucket.uri, "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"w"
        process.send_signal(signal.SIGINT)
        assert process.wait(FAR_SECONDS) == 130
        assert b"copied" not in process.stderr.read()


def test_progress_is_not_shown_over_the_data(environment, bucket) -> None:
    data = b"line\r\n" * 2000
    bucket.put("k", data)
    terminal = Terminal(environment, "cp", f"{bucket.uri}/k", "-")
    assert terminal.end() == 0
    assert terminal.text.replace("\r", "") == data.decode().replace("\r", "")


def test_progress_counts_objects_if_all_are_empty() -> None:
    progress = Progress()
    for size in (0, 0):
        progress.plan(size)
    progress.finish(0)
    assert progress.completed == (1, 2)
    progress.plan(5)
    assert progress.completed == (0, 5)
    progress.plan(-1)
    assert progress.completed == (0, None)


def test_progress_has_no_total_before_the_listing_ends() -> None:
    """Nine tenths of what is listed so far may be less than a half of all."""
    progress = Progress(num_listings=1)
    for _ in range(2):
        progress.plan(1024)
    progress.finish(1024)
    assert progress.completed == (1024, None)
    assert amount(progress) == "1.0 KiB, 1 of 2 found so far"
    progress.num_listings = 0
    assert progress.completed == (1024, 2048)
    assert amount(progress) == "1.0 KiB of 2.0 KiB, 1 of 2"


async def test_the_total_is_known_when_the_listing_has_ended(cli_server, bucket, tmp_path) -> None:
    """Batches are copied while the listing continues."""
    from aioflux.store import open_store

    progress, seen = Progress(num_listings=1), []
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"x")

    async def jobs():
        for number in range(200):
            path = str(tmp_path / f"{number}")
            yield CopyJob(path, f"{bucket.uri}/{number}", path, str(number), 1)
            seen.append(progress.completed[1])

    async with open_store(bucket.uri, endpoint_url=cli_server.url) as store:
        files = LocalFiles(FileThreads(), no_clobber=False)
        await Copier(files, StoreObjects(store), progress, Report()).run(jobs())
    assert seen == [None] * 200
    assert progress.completed == (200, 200)


async def test_a_file_that_is_gone_does_not_stop_the_others(cli_server, bucket, tmp_path) -> None:
    """It was there when the directory was listed."""
    from aioflux.store import open_store

    (tmp_path / "here").write_bytes(b"1")
    jobs = [
        CopyJob(str(tmp_path / name), f"{bucket.uri}/{name}", str(tmp_path / name), name, 1)
        for name in ("gone", "here")
    ]
    bodies = await LocalFiles(FileThreads(), no_clobber=False).read_many(jobs)
    async with open_store(bucket.uri, endpoint_url=cli_server.url) as store:
        gone, here = await StoreObjects(store).write_many(jobs, bodies)
    assert isinstance(gone, FileNotFoundError)
    assert here is None
    assert bucket.contents() == {"here": b"1"}


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="root reads anything else")
def test_a_file_that_cannot_be_read_is_one_failure(aioflux, bucket) -> None:
    contents = {f"{at:03}": b"1" for at in range(300)}
    write_files(Path("src"), contents)
    os.symlink("/proc/self/mem", "src/150x")  # its first byte cannot be read
    ended = aioflux("cp", "-r", "src", bucket.uri)
    assert ended.status == 1
    assert "src/150x to " in ended.err
    assert ended.err.splitlines()[-1].endswith("; 1 failed")
    assert bucket.contents() == contents


async def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path) -> None:

    path = tmp_path / "file"
    path.write_bytes(b"x" * 20 * MIB)
    job = CopyJob(str(path), "", str(path), "", 20 * MIB)
    pieces = LocalFiles(FileThreads(), no_clobber=False).pieces(job)
    await anext(pieces)
    with path.open("ab") as file:
        file.write(b"more")
    await anext(pieces)
    with pytest.raises(ValueError, match="it changed while it was read"):
        await anext(pieces)

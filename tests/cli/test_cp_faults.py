"""`aioflux cp`: standard streams, progress, and sources that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import FAR_SECONDS, PROGRAM, read_files, write_files
from tests.cli.test_cp import TREE, fill
from tests.cli.test_process import Terminal

MIB = 1024 * 1024
LARGE = 17 * MIB
"""Above the size up to which an object is read at once."""


def test_an_object_that_is_damaged_does_not_arrive(aioflux, bucket, cli_server) -> None:
    """Its bytes do not match the crc32c that was listed; the others arrive."""
    fill(bucket)
    with cli_server.faults.inject("objects.media", bucket=bucket.name, key="a", flip_at=0):
        ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert "crc32c" in ended.err
    assert sorted(read_files(Path("out"))) == sorted(set(TREE) - {"a"})


@pytest.mark.parametrize("size", [1000, LARGE], ids=["small", "large"])
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
    bucket.put("k", b"x" * LARGE)
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


def test_standard_streams(aioflux, give_input, bucket) -> None:
    data = b"0123456789" * (2 * MIB)
    give_input(data)
    assert aioflux("cp", "-", f"{bucket.uri}/k").status == 0
    assert bucket.get("k") == data
    ended = aioflux("cp", f"{bucket.uri}/k", "-")
    is_same = ended.out.encode() == data
    assert (ended.status, is_same, ended.err) == (0, True, "")
    give_input(b"123")
    assert aioflux("cp", "-", "file").status == 0
    assert Path("file").read_bytes() == b"123"


def test_standard_output_takes_one_source_after_the_other(
    aioflux, give_input, bucket, tmp_path
) -> None:
    """Small and large ones, of every origin: in the order of the arguments."""
    contents = [bytes([65 + at]) * size for at, size in enumerate([9, LARGE, LARGE, 8, 7, 6])]
    paths = [tmp_path / str(at) for at in range(3)]
    for path, data in zip(paths, contents, strict=False):
        path.write_bytes(data)
    bucket.put("3", contents[3])
    bucket.put("5", contents[5])
    give_input(contents[4])
    ended = aioflux("cp", *paths, f"{bucket.uri}/3", "-", f"{bucket.uri}/5", "-")
    assert (ended.status, ended.err) == (0, "")
    is_same = ended.out.encode() == b"".join(contents)
    assert is_same


def test_a_source_that_fails_does_not_stop_the_others_to_standard_output(aioflux, bucket) -> None:
    fill(bucket)
    ended = aioflux("cp", f"{bucket.uri}/a", f"{bucket.uri}/none", f"{bucket.uri}/d/b", "-")
    assert (ended.status, ended.out) == (1, "12")
    assert f"{bucket.uri}/none" in ended.err


def test_standard_input_has_the_media_type_of_its_target(aioflux, give_input, bucket) -> None:
    give_input(b"{}")
    assert aioflux("cp", "-", f"{bucket.uri}/x.json").status == 0
    row = json.loads(aioflux("stat", "--json", f"{bucket.uri}/x.json").out)
    assert row["content_type"] == "application/json"


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

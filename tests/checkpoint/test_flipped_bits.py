"""Bits flipped in files of `file://`: a load raises, or returns what was saved."""

from __future__ import annotations

import os
import random
import re
import shutil
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aioflux import CheckpointCorruptError, ChecksumError, TransferOptions
from aioflux.checkpoint import Checkpointer, load, save
from tests.checkpoint.test_torch import as_bytes, assert_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_FLIPS = 100
NUM_STEP_FLIPS = 30


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(20, 30, generator=generator),
        "bias": torch.randn(30, generator=generator),
        "optimizer": {"step": 7, "lr": 0.125, "name": "sgd"},
    }


def flips(path: Path, *, keeps_time: bool, num_flips: int = NUM_FLIPS) -> Iterator[tuple[int, int]]:
    """Flip one bit of a file at a time, in place, and mend it after each."""
    rng = random.Random(0)
    size = path.stat().st_size
    for _ in range(num_flips):
        at, bit = rng.randrange(size), rng.randrange(8)
        status = path.stat()
        flip(path, at, bit)
        if keeps_time:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        yield at, bit
        flip(path, at, bit)
        if keeps_time:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def raises_or_loads(path: Path, saved: dict[str, Any], what: str, *, mmap: bool) -> bool:
    """Return whether a load raises; if it does not, it has to return what was saved."""
    try:
        loaded = load(path.as_uri(), mmap=mmap)
    except Exception:
        return True
    try:
        assert_equal(saved, loaded)
    except AssertionError:
        pytest.fail(f"{what} was flipped, and a wrong value was loaded")
    return False


def by_torch(saved: dict[str, Any], path: Path) -> None:
    torch.save(saved, path)


def by_aioflux(saved: dict[str, Any], path: Path) -> None:
    save(saved, path.as_uri())


def by_aioflux_and_cp(saved: dict[str, Any], path: Path) -> None:
    """A copy has the bytes, and no attributes."""
    save(saved, path.with_name("other.pt").as_uri())
    shutil.copyfile(path.with_name("other.pt"), path)


@pytest.mark.parametrize("keeps_time", [True, False], ids=["at-rest", "rewritten"])
@pytest.mark.parametrize("write", [by_torch, by_aioflux, by_aioflux_and_cp])
def test_a_flipped_bit_is_never_a_wrong_value(
    tmp_path: Path, write: Callable[[dict[str, Any], Path], None], *, keeps_time: bool
) -> None:
    path = tmp_path / "model.pt"
    saved = state()
    write(saved, path)
    num_raised = 0
    for at, bit in flips(path, keeps_time=keeps_time):
        try:
            loaded = load(path.as_uri(), mmap=bool(bit % 2))
        except Exception:
            num_raised += 1
        else:
            try:
                assert_equal(saved, loaded)
            except AssertionError:
                pytest.fail(f"bit {bit} of byte {at} was flipped and loaded without an error")
    assert num_raised > NUM_FLIPS // 2
    assert_equal(saved, load(path.as_uri()))


@pytest.mark.parametrize(("field", "num_bits"), [(10, 16), (38, 32)], ids=["method", "attributes"])
def test_a_flipped_bit_of_an_entry_is_never_a_wrong_value(
    tmp_path: Path, field: int, num_bits: int
) -> None:
    """torch inflates what is called deflated, and reads nothing of what is called a directory."""
    path = tmp_path / "model.pt"
    saved = state()
    by_aioflux_and_cp(saved, path)
    for entry in re.finditer(b"PK\x01\x02", path.read_bytes()):
        for bit in range(num_bits):
            at = entry.start() + field + bit // 8
            flip(path, at, bit % 8)
            raises_or_loads(path, saved, f"bit {bit} of field {field}", mmap=bool(bit % 2))
            flip(path, at, bit % 8)


def test_deflated_bytes_that_cannot_be_inflated_are_a_checksum_error(tmp_path: Path) -> None:
    stored, path = tmp_path / "stored.pt", tmp_path / "model.pt"
    torch.save(state(), stored)
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry), zipfile.ZIP_DEFLATED)
        first = target.infolist()[0]
    start = first.header_offset + 30 + len(first.filename.encode())
    assert_equal(state(), load(path.as_uri()))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff")  # a block of no known type
    with pytest.raises(ChecksumError, match="cannot be read"):
        load(path.as_uri())


@pytest.mark.parametrize(
    ("keeps_time", "is_into"),
    [(True, True), (False, False)],
    ids=["at-rest-into", "rewritten-new"],
)
def test_a_flipped_bit_of_a_step_is_never_a_wrong_value(
    tmp_path: Path, *, keeps_time: bool, is_into: bool
) -> None:
    saved = {name: state()[name] for name in ("weight", "bias")}
    with Checkpointer(tmp_path.as_uri()) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.history()  # the record is written after the save
        for path in [each for each in tmp_path.rglob("*") if each.is_file()]:
            for at, bit in flips(path, keeps_time=keeps_time, num_flips=NUM_STEP_FLIPS):
                into = {name: torch.zeros_like(each) for name, each in saved.items()}
                with suppress(Exception):
                    loaded = checkpoints.load(into=into if is_into else None)
                    if not all(
                        torch.equal(saved[n], (into if is_into else loaded)[n]) for n in saved
                    ):
                        pytest.fail(f"bit {bit} of byte {at} of {path.name} was not noticed")


def test_the_error_names_the_damaged_record_and_the_object(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    at = path.read_bytes().index(as_bytes(state()["bias"]).numpy().tobytes())
    flip(path, at, 3)
    with pytest.raises(ChecksumError, match=r"data/1.*CRC-32") as caught:
        load(path.as_uri())
    assert caught.value.uri == path.as_uri()
    loaded = load(path.as_uri(), transfer=TransferOptions(verify=False))
    assert not torch.equal(loaded["bias"], state()["bias"])


def test_a_step_whose_commit_fails_its_checksum_is_damaged_and_can_be_saved_again(
    tmp_path: Path,
) -> None:
    """The service finds the damage, before the commit is decoded."""
    with Checkpointer(tmp_path.as_uri()) as checkpointer:
        checkpointer.save(1, {"a": 1})
        checkpointer.save(2, {"a": 2})
        path = tmp_path / "step-00000002" / ".metadata"
        status = path.stat()
        flip(path, status.st_size // 2, 0)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(CheckpointCorruptError, match=r"step-00000002/\.metadata is damaged"):
            checkpointer.load(2)
        with pytest.warns(RuntimeWarning, match="failed verification"):
            assert checkpointer.load() == {"a": 1}
        checkpointer.save(2, {"a": 3})
        assert checkpointer.load() == {"a": 3}

"""torch.save and torch.load through checkpoint files."""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import aioflux
from aioflux import TransferOptions
from aioflux.checkpoint import open_reader, open_writer
from tests.patience import PATIENT

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer

pytestmark = [pytest.mark.clouds("gs", "s3", "az"), pytest.mark.usefixtures("_patient")]

MIB = 1024 * 1024
URI = "gs://bucket/run/model.pt"
SMALL = TransferOptions(part_size_bytes=5 * MIB, range_size_bytes=MIB, max_buffered_bytes=10 * MIB)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]


def state(num_elements: int = 1000) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, object] = {
        str(dtype): torch.randint(0, 2, (num_elements,), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    shared = torch.randn(10, 30, generator=generator)
    return {**tensors, "view": shared[2:5, ::3], "base": shared, "step": 7, "empty": torch.ones(0)}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_equal(left: dict[str, object], right: dict[str, object]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right[key]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert (value.dtype, value.shape) == (other.dtype, other.shape)
            assert torch.equal(as_bytes(value), as_bytes(other))
        else:
            assert value == other


@pytest.mark.parametrize(
    ("num_elements", "weights_only"),
    [(1000, True), (1000, False), (300_000, True)],
    ids=["one-request", "of-any-kind", "parts"],
)
def test_a_state_dict_comes_back_equal(
    server: GCSServer, num_elements: int, weights_only: bool
) -> None:
    saved = state(num_elements)
    with open_writer(URI, transfer=SMALL) as file:
        torch.save(saved, file)
    with open_reader(URI, transfer=SMALL) as file:
        assert_equal(saved, torch.load(file, weights_only=weights_only))


def test_the_legacy_format_works_too(server: GCSServer) -> None:
    saved = {"weight": torch.randn(100, 100), "step": 7}
    with open_writer(URI) as file:
        torch.save(saved, file, _use_new_zipfile_serialization=False)
    with open_reader(URI) as file:
        assert_equal(saved, torch.load(file))


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_services_work_alike(scheme: str, tmp_path: Path) -> None:
    uri = "memory://torch/model.pt" if scheme == "memory" else f"file://{tmp_path}/model.pt"
    saved = state()
    with open_writer(uri) as file:
        torch.save(saved, file)
    with open_reader(uri) as file:
        assert_equal(saved, torch.load(file))


def test_weights_only_still_refuses_other_objects(server: GCSServer) -> None:
    with open_writer(URI) as file:
        torch.save({"arguments": Namespace(lr=1)}, file)
    with open_reader(URI) as file, pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)


@pytest.mark.clouds("gs")
def test_a_failed_write_is_raised_as_itself(server: GCSServer) -> None:
    """torch.save makes a RuntimeError of it, about positions in a zip file."""
    server.faults.add("*", status=403)
    with (
        pytest.raises(aioflux.PermissionDeniedError, match=URI),
        open_writer(URI, transfer=SMALL) as file,
    ):
        torch.save(state(300_000), file)
    server.faults.clear()
    assert server.keys("bucket") == []
    assert server.stats.open_uploads == 0


def test_a_failed_save_leaves_the_object_before_it(server: GCSServer) -> None:
    """torch.save ends its zip file properly even if it failed half-way."""
    server.put("bucket", "run/model.pt", b"good")
    with pytest.raises(Exception, match="lambda"), open_writer(URI) as file:
        torch.save({"a": torch.ones(10), "b": lambda: None}, file)
    assert server.get("bucket", "run/model.pt") == b"good"


@pytest.mark.clouds("gs")
def test_loading_crosses_to_the_service_once_a_range(server: GCSServer) -> None:
    """300 tensors in 4 MiB: a head, and each range of 1 MiB at most twice."""
    saved = {str(number): torch.randn(3500) for number in range(300)}
    with open_writer(URI, transfer=SMALL) as file:
        torch.save(saved, file)
    server.stats.reset()
    once = replace(SMALL, verify_ranges=False)
    with open_reader(URI, transfer=once, timeouts=PATIENT) as file:
        assert_equal(saved, torch.load(file))
    assert server.stats.total.requests <= 1 + 2 * 5


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("num_mib", [20, 90], ids=["prefetched whole", "larger"])
def test_loading_over_plain_http_reads_hardly_a_byte_twice(server: GCSServer, num_mib: int) -> None:
    """torch.load reads the directory at the end first, and then all tensors in order."""
    sizes = (num_mib * MIB // 2, 3, num_mib * MIB // 3, num_mib * MIB // 6)
    saved = {f"a{size}": torch.arange(size // 4, dtype=torch.int32) for size in sizes}
    with open_writer(URI) as file:
        torch.save(saved, file)
    server.stats.reset()
    with open_reader(URI, timeouts=PATIENT) as file:
        assert_equal(saved, torch.load(file))
    assert server.stats.operation("objects.get").bytes_out <= 1.05 * file.meta.size


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_forgets_files_of_its_parent(server: GCSServer) -> None:
    """The child ends without a trace; the parent's file goes on and is stored."""
    with open_writer(URI, transfer=SMALL) as file:
        file.write(bytes(12 * MIB))
        child = os.fork()
        if not child:
            try:
                file.write(bytes(2 * MIB))
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        file.write(bytes(MIB))
    assert file.meta.size == 13 * MIB


@pytest.mark.clouds("gs")
def test_an_error_inside_torch_load_names_its_cause(server: GCSServer) -> None:
    """torch's reader may replace the error of a read by one about `read` or a closed file."""
    with open_writer(URI) as file:
        torch.save({str(number): torch.ones(MIB) for number in range(16)}, file)

    def replace_object(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        server.put("bucket", "run/model.pt", b"another object")
        return storage

    options = replace(SMALL, verify_ranges=False)  # or the exit would read again, and fail itself
    with (
        pytest.raises(aioflux.NotFoundError, match="was replaced"),
        open_reader(URI, transfer=options) as file,
    ):
        torch.load(file, map_location=replace_object)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("error", [AttributeError, ValueError, RuntimeError])
def test_an_error_that_hides_a_failed_read_is_replaced_by_it(
    server: GCSServer, error: type[Exception]
) -> None:
    with open_writer(URI) as file:
        file.write(bytes(5 * MIB))

    def read() -> None:
        with open_reader(URI) as file, server.faults.inject("objects.get", status=403):
            with suppress(aioflux.PermissionDeniedError):
                file.read(10)
            raise error("read of closed file")

    with pytest.raises(aioflux.PermissionDeniedError) as caught:
        read()
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.clouds("gs")
def test_an_error_that_names_a_failed_read_as_its_cause_is_kept(server: GCSServer) -> None:
    with open_writer(URI) as file:
        file.write(bytes(5 * MIB))

    def read() -> None:
        with open_reader(URI) as file, server.faults.inject("objects.get", status=403):
            try:
                file.read(10)
            except aioflux.PermissionDeniedError as exc:
                raise ValueError("no model") from exc

    with pytest.raises(ValueError, match="no model"):
        read()


@pytest.mark.clouds("gs")
def test_an_error_after_a_repeated_read_is_not_replaced(server: GCSServer) -> None:
    with open_writer(URI) as file:
        file.write(bytes(5 * MIB))
    retry = aioflux.RetryPolicy(max_attempts=1)

    def read() -> None:
        with open_reader(URI, retry=retry) as file:
            with (
                server.faults.inject("objects.media", status=503),
                pytest.raises(aioflux.TransientError),
            ):
                file.read(10)
            assert file.read(10) == bytes(10)
            raise AttributeError("of the caller")

    with pytest.raises(AttributeError, match="of the caller"):
        read()

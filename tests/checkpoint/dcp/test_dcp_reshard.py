"""StorageReader on four ranks: any sharding from any other, by the bytes that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aioflux.checkpoint.dcp import load_state
from aioflux.testing import GCSServer
from tests.checkpoint.dcp import ranks as ranks_of_a_job
from tests.checkpoint.dcp.load_task import full_state
from tests.checkpoint.dcp.states import assert_equal
from tests.checkpoint.replaced import ReplacedOnce

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.more

WORLD_SIZE = 4


class Ranks(ranks_of_a_job.Ranks):
    """Four processes of one gloo group that save and load on command."""

    def save(self, uri: str, sharding: str, *, writer: str = "ours", **more: Any) -> None:
        command = {"seed": 5, "scale": 1, **more}
        answers = self.tell(op="save", uri=uri, sharding=sharding, writer=writer, **command)
        assert answers == [{}] * WORLD_SIZE

    def load(self, uri: str, sharding: str, **more: Any) -> list[dict[str, Any]]:
        command = {"seed": 5, "scale": 1, **more}
        return self.tell(op="load", uri=uri, sharding=sharding, **command)


@pytest.fixture(scope="module")
def place() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(place: GCSServer) -> Iterator[Ranks]:
    with Ranks("tests.checkpoint.dcp.load_task", WORLD_SIZE, place.url) as started:
        yield started


@pytest.fixture(autouse=True)
def _to_the_server(place: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", place.url)
    yield
    place.faults.clear()


def loaded(answers: list[dict[str, Any]]) -> int:
    """Bytes that all ranks needed; each compared what it loaded with what it should be."""
    return sum(answer["num_bytes"] for answer in answers)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("rows of 4", "rows of 3"),
        ("rows of 3", "columns of 4"),
        ("columns of 4", "columns of 3"),
        ("columns of 3", "rows and columns"),
        ("rows and columns", "rows twice"),
        ("replicas of rows", "replicas"),
        ("replicas", "one"),
        ("one", "rows of 4"),
    ],
)
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_every_sharding_loads_from_another(
    ranks: Ranks, tmp_path: Path, saved: str, wanted: str, writer: str
) -> None:
    uri = f"gs://bucket/{saved}" if writer == "ours" else str(tmp_path)
    ranks.save(uri, saved, writer=writer)
    uri = uri if writer == "ours" else f"file://{tmp_path}"
    loaded(ranks.load(uri, wanted))
    assert_equal({**full_state(5), "step": 5}, load_state(uri))


def test_shards_in_the_layout_of_safetensors_load(ranks: Ranks) -> None:
    ranks.save("gs://bucket/st", "rows of 4", options={"layout": "safetensors"})
    loaded(ranks.load("gs://bucket/st", "columns of 3"))
    assert_equal({**full_state(5), "step": 5}, load_state("gs://bucket/st"))


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_three_ranks_of_four_read_a_twentieth_more_than_they_need(
    ranks: Ranks, place: GCSServer, tmp_path: Path, writer: str
) -> None:
    scale = 4000  # 15 MB and more in each tensor that is cut evenly
    uri = "gs://bucket/large"
    ranks.save(uri if writer == "ours" else str(tmp_path), "rows of 4", writer=writer, scale=scale)
    if writer == "stock":
        uri = "gs://bucket/large-stock"
        for path in tmp_path.iterdir():
            place.put("bucket", f"large-stock/{path.name}", path.read_bytes())
    place.stats.reset()
    needed = loaded(ranks.load(uri, "rows of 3", scale=scale))
    read = place.stats.operation("objects.get").bytes_out
    assert read <= 1.05 * needed, f"{read / needed:.3f}"


def test_one_rank_reads_the_metadata_for_all(ranks: Ranks, place: GCSServer) -> None:
    ranks.save("gs://bucket/c", "rows of 4")
    # A second read would fail, and the load with it.
    with place.faults.inject("objects.get", key="c/.metadata", status=403, skip=1):
        loaded(ranks.load("gs://bucket/c", "rows of 4"))


@pytest.mark.parametrize("after", [b".metadata", b"__1_0.distcp"], ids=["commit", "one rank's"])
def test_all_ranks_read_the_same_new_checkpoint_if_it_is_replaced_meanwhile(
    ranks: Ranks, place: GCSServer, after: bytes
) -> None:
    uri, name = "gs://bucket", f"replaced/{len(after)}/"
    ranks.save(f"{uri}/{name}old", "rows of 4", seed=4)
    ranks.save(f"{uri}/{name}new", "rows of 4")
    replaced = ReplacedOnce(place, f"{name}old/", f"{name}new/", after=after)
    loaded(ranks.load(f"{uri}/{name}old", "columns of 4"))
    assert replaced.is_done


def test_without_a_group_each_rank_reads_the_metadata(ranks: Ranks, place: GCSServer) -> None:
    ranks.save("gs://bucket/c", "rows of 4")
    loaded(ranks.load("gs://bucket/c", "rows of 4", shares=False))
    with place.faults.inject("objects.get", key="c/.metadata", status=403, skip=WORLD_SIZE - 1):
        failed = failures(ranks.load("gs://bucket/c", "rows of 4", shares=False))
    assert [kind for kind, _ in failed.values()] == ["PermissionDeniedError"]


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "each rank"])
def test_errors_of_the_metadata_reach_all_ranks(
    ranks: Ranks, place: GCSServer, shares: bool
) -> None:
    ranks.save("gs://bucket/c", "rows of 4")
    with place.faults.inject("objects.get", key="c/.metadata", status=403):
        failed = failures(ranks.load("gs://bucket/c", "rows of 4", shares=shares))
    assert {kind for kind, _ in failed.values()} == {"PermissionDeniedError"}
    assert sorted(failed) == ["0", "1", "2", "3"]


def test_a_rank_that_loads_alone_waits_for_no_other(ranks: Ranks) -> None:
    ranks.save("gs://bucket/c", "rows of 4")
    answers = ranks.load("gs://bucket/c", "rows of 4", alone=2)
    assert [bool(answer) for answer in answers] == [False, False, True, False]


def failures(answers: list[dict[str, Any]]) -> dict[str, list[str]]:
    assert all(answer == answers[0] for answer in answers)
    found: dict[str, list[str]] = answers[0]["failures"]
    return found


def test_no_checkpoint_fails_all_ranks_as_that(ranks: Ranks) -> None:
    failed = failures(ranks.load("gs://bucket/nothing", "rows of 4"))
    assert {kind for kind, _ in failed.values()} == {"CheckpointNotFoundError"}


def test_damage_to_what_one_rank_needs_fails_all_ranks(ranks: Ranks, place: GCSServer) -> None:
    ranks.save("gs://bucket/c", "rows of 4")
    key = next(key for key in place.keys("bucket", "c/") if "__1_" in key)
    with place.faults.inject("objects.get", key=key, flip_at=900):
        failed = failures(ranks.load("gs://bucket/c", "rows of 4"))
    assert "1" in failed
    for kind, message in failed.values():  # of others, too, where they read values from there
        assert kind == "CheckpointCorruptError"
        assert key in message

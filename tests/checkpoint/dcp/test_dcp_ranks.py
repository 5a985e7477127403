"""StorageWriter on two ranks: a save succeeds on both, or fails on both and says where."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import INDEX_KEY, Commit, decode_commit, decode_index
from aioflux.testing import GCSServer
from tests.checkpoint.dcp import ranks as ranks_of_a_job
from tests.checkpoint.dcp.rank_task import full_state
from tests.checkpoint.dcp.states import assert_equal, copy_down, stock_load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.more

WORLD_SIZE = 2


class Ranks(ranks_of_a_job.Ranks):
    """Two processes of one gloo group that save on command."""

    def save(self, seed: int, uri: str = "gs://bucket/c", **command: Any) -> list[dict[str, Any]]:
        return self.tell(op="save", seed=seed, uri=uri, **command)


@pytest.fixture(scope="module")
def place() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(place: GCSServer) -> Iterator[Ranks]:
    with Ranks("tests.checkpoint.dcp.rank_task", WORLD_SIZE, place.url) as started:
        yield started


@pytest.fixture(autouse=True)
def _no_faults(place: GCSServer) -> Iterator[None]:
    yield
    place.faults.clear()


def whole_state(seed: int, num_rows: int = 37) -> dict[str, Any]:
    own = {f"own-{rank}": torch.full((3,), float(rank)) for rank in range(WORLD_SIZE)}
    return {**full_state(seed, num_rows), **own}


def assert_saved(answers: list[dict[str, Any]], seed: int) -> None:
    assert answers == [{"saved": seed}] * WORLD_SIZE


def assert_failed(answers: list[dict[str, Any]], rank: int, *words: str) -> None:
    """Both ranks report the same: which rank failed, on what."""
    assert answers[0] == answers[1]
    failures = answers[0]["failures"]
    assert str(rank) in failures
    for word in (f"rank {rank} ", *words):
        assert word in failures[str(rank)]


def assert_loads(place: GCSServer, folder: Path, seed: int, prefix: str = "c") -> None:
    state = whole_state(seed)
    assert_equal(stock_load(copy_down(place, prefix, folder), state), state)


def test_ranks_share_a_save(ranks: Ranks, place: GCSServer, tmp_path: Path) -> None:
    assert_saved(ranks.save(1, options={"objects_per_rank": 2}), 1)
    _, commit = decode_commit(place.get("bucket", "c/.metadata"), uri="")
    assert commit is not None
    assert commit.world_size == WORLD_SIZE
    assert {each.rank for each in commit.objects} == {0, 1}
    assert {each.key.split("/")[0] for each in commit.objects} == {commit.save_id}
    assert_loads(place, tmp_path, 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"reset": True}, {"status": 403}], ids=["503", "reset", "403"]
)
def test_a_fault_in_any_object_of_any_rank_fails_the_save_everywhere(
    ranks: Ranks, place: GCSServer, fault: dict[str, Any], number: int, rank: int, tmp_path: Path
) -> None:
    assert_saved(ranks.save(1, options={"objects_per_rank": 2}), 1)
    before = place.keys("bucket", "c/")
    with place.faults.inject("*", key=f"*/__{rank}_{number}.distcp", **fault):
        answers = ranks.save(2, options={"objects_per_rank": 2})
    assert_failed(answers, rank, f"__{rank}_{number}.distcp", "gs://bucket/c/")
    assert set(before) <= set(place.keys("bucket", "c/"))
    assert place.stats.open_uploads == 0
    assert_loads(place, tmp_path, 1)


@pytest.mark.parametrize("lost", [False, True], ids=["503", "lost-answers"])
def test_a_storm_that_passes_fails_nothing(
    ranks: Ranks, place: GCSServer, lost: bool, tmp_path: Path
) -> None:
    what: dict[str, Any] = {"lost": True} if lost else {"status": 503}
    for rank in range(WORLD_SIZE):
        place.faults.add("*", key=f"*/__{rank}_*.distcp", times=1, **what)
    assert_saved(ranks.save(3, uri="gs://bucket/storm"), 3)
    place.faults.clear()
    assert_loads(place, tmp_path, 3, "storm")


def test_in_any_storm_ranks_agree_and_the_last_success_stays(
    ranks: Ranks, place: GCSServer, tmp_path: Path
) -> None:
    """Whatever meets whichever request: both ranks say the same, and what they say is so."""
    kinds: list[dict[str, Any]] = [
        {"status": 503},
        {"reset": True},
        {"lost": True},
        {"status": 500},
    ]
    outcomes = []
    possible = {0}
    assert_saved(ranks.save(0, uri="gs://bucket/any"), 0)
    for seed in range(1, 13):
        for number, kind in enumerate(kinds):
            place.faults.add("*", probability=0.1, seed=31 * seed + number, **kind)
        answers = ranks.save(seed, uri="gs://bucket/any", options={"objects_per_rank": 2})
        place.faults.clear()
        assert answers[0] == answers[1]
        outcomes.append("saved" in answers[0])
        # A commit whose every answer was lost may be there although the save failed.
        possible = {seed} if outcomes[-1] else {*possible, seed}
        folder = copy_down(place, "any", tmp_path / str(seed))
        loaded = stock_load(folder, whole_state(0))
        assert loaded["step"] in possible
        assert_equal(loaded, whole_state(loaded["step"]))
        possible = {loaded["step"]}
    assert any(outcomes)


def test_parts_that_fail_fail_the_save(ranks: Ranks, place: GCSServer) -> None:
    """Objects of several parts; only later ones fail."""
    with place.faults.inject("xml.multipart.part", status=503, key="*/__1_0.distcp", skip=1):
        answers = ranks.save(4, uri="gs://bucket/parts", num_rows=300_000)
    assert_failed(answers, 1, "__1_0.distcp")
    assert place.stats.open_uploads == 0
    assert [key for key in place.keys("bucket", "parts/") if "__1_" in key] == []


def test_a_full_disk_fails_the_save_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    """The one rank may write no more than so many bytes to an object."""
    uri = f"file://{tmp_path}/c"
    assert_saved(ranks.save(1, uri=uri), 1)
    answers = ranks.save(2, uri=uri, fails="full", room=4096, num_rows=4000)
    assert_failed(answers, 1, "__1_0.distcp")
    assert_equal(stock_load(tmp_path / "c", whole_state(1)), whole_state(1))


def test_an_error_that_does_not_pickle_hangs_no_rank(ranks: Ranks, place: GCSServer) -> None:
    answers = ranks.save(2, uri="gs://bucket/odd", fails="unpicklable")
    assert_failed(answers, 1, "UnpicklableError: code 7", "of the state could not be read")
    assert [key for key in place.keys("bucket", "odd/") if "__1_" in key] == []


@pytest.mark.parametrize(
    ("operation", "key"), [("*", "*.metadata"), ("*insert*", "*.metadata")], ids=["begin", "commit"]
)
def test_what_fails_on_the_coordinator_fails_everywhere(
    ranks: Ranks, place: GCSServer, operation: str, key: str
) -> None:
    with place.faults.inject(operation, status=403, key=key):
        answers = ranks.save(2, uri="gs://bucket/none")
    assert_failed(answers, 0, "gs://bucket/none")
    assert place.keys("bucket", "none/") == []


def test_create_fails_everywhere_where_there_is_one(ranks: Ranks) -> None:
    options = {"mode": "create"}
    assert_saved(ranks.save(1, uri="gs://bucket/once", options=options), 1)
    answers = ranks.save(2, uri="gs://bucket/once", options=options)
    assert answers[0] == answers[1]
    assert "gs://bucket/once/.metadata exists" in answers[0]["failures"]["0"]


def test_cached_plans_name_one_save_on_all_ranks(
    ranks: Ranks, place: GCSServer, tmp_path: Path
) -> None:
    names = set()
    for seed in range(3):
        assert_saved(
            ranks.save(seed, uri="gs://bucket/cached", planner={"enable_plan_caching": True}), seed
        )
        keys = place.keys("bucket", "cached/")
        assert len(keys) == 3
        assert len({key.split("/")[1] for key in keys}) == 2
        names |= {key.split("/")[1] for key in keys}
    assert len(names) == 4
    assert_loads(place, tmp_path, 2, "cached")


def test_without_collectives_ranks_keep_out_of_each_others_way(
    ranks: Ranks, place: GCSServer
) -> None:
    for seed in (1, 2):
        assert_saved(ranks.save(seed, uri="gs://bucket/alone", use_collectives=False), seed)
    keys = place.keys("bucket", "alone/")
    assert len(keys) == 4
    assert keys[-2:] == ["alone/__0.metadata", "alone/__1.metadata"]
    for rank in range(WORLD_SIZE):
        data = place.get("bucket", f"alone/__{rank}.metadata")
        _, commit = decode_commit(data, uri="")
        assert isinstance(commit, Commit)
        assert [each.rank for each in commit.objects] == [rank]
        assert f"alone/{commit.objects[0].key}" in keys
        named = {info.relative_path for info in pickle.loads(data).storage_data.values()}
        assert named == {commit.objects[0].key}


@pytest.mark.parametrize(
    ("num_rows", "num_composes"), [(37, 0), (400_001, 1)], ids=["assembled", "composed"]
)
def test_tensors_that_ranks_share_are_whole_in_one_object_of_safetensors(
    ranks: Ranks, place: GCSServer, tmp_path: Path, num_rows: int, num_composes: int
) -> None:
    """Rows of a large tensor are composed on the service, all others by the coordinator."""
    uri, state = "gs://bucket/whole", whole_state(1, num_rows)
    options = {"layout": "safetensors"}
    place.stats.reset()
    assert_saved(ranks.save(1, uri=uri, num_rows=num_rows, options=options), 1)
    assert place.stats.operation("objects.compose").requests == num_composes
    folder = copy_down(place, "whole", tmp_path)
    index, commit = decode_index((folder / INDEX_KEY).read_bytes(), uri="")
    assert commit is not None
    assert set(index["weight_map"]) == state.keys() - {"step"}
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert found == {INDEX_KEY, *(each.key for each in commit.objects)}
    for name, key in index["weight_map"].items():
        with safe_open(folder / key, framework="pt") as file:
            assert_equal(file.get_tensor(name), state[name])
    for each in commit.objects:
        data = (folder / each.key).read_bytes()
        assert crc32c(data) == each.crc32c
        starts = range(0, len(data), each.block_size)
        blocks = [crc32c(data[at : at + each.block_size]) for at in starts]
        assert b"".join(block.to_bytes(4, "big") for block in blocks) == each.block_crcs


@pytest.mark.parametrize("key", ["*/parts-1", "*/rows-1-*", "*model-*"])
def test_a_fault_in_any_part_of_safetensors_fails_the_save(
    ranks: Ranks, place: GCSServer, key: str
) -> None:
    uri = "gs://bucket/torn"
    with place.faults.inject("*", status=403, key=key):
        answers = ranks.save(1, uri=uri, num_rows=400_000, options={"layout": "safetensors"})
    assert answers[0] == answers[1]
    assert "gs://bucket/torn/" in str(answers[0]["failures"])
    assert place.stats.open_uploads == 0
    assert f"torn/{INDEX_KEY}" not in place.keys("bucket", "torn/")


def test_a_process_saves_in_the_background(ranks: Ranks, place: GCSServer, tmp_path: Path) -> None:
    """The writer crosses to it by pickle; its errors come back the same way."""
    uri = "gs://bucket/process"
    assert_saved(ranks.tell(op="process", seed=5, uri=uri), 5)
    assert_loads(place, tmp_path, 5, "process")
    with place.faults.inject("*", status=403, key="*/__1_0.distcp"):
        answers = ranks.tell(op="process", seed=6, uri=uri)
    assert_failed(answers, 1, "__1_0.distcp")

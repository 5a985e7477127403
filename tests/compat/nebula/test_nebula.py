"""Every name of Nebula, with its meaning."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux.checkpoint import load, verify
from aioflux.compat import nebula as nm
from aioflux.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer


def state_of(number: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((300, 100), number), "bias": torch.full((100,), -number)}


def is_state_of(number: float, state: dict[str, torch.Tensor]) -> bool:
    wanted = state_of(number)
    return all(torch.equal(state[name], wanted[name]) for name in wanted)


def commit(tag: str, number: float, name: str = "model") -> None:
    nm.Checkpoint(tag).save(name, state_of(number))


def latest() -> nm.Checkpoint:
    found = nm.get_latest_checkpoint()
    assert found is not None
    return found


@pytest.mark.parametrize("place", ["gs", "memory"])
def test_the_newest_is_loaded_before_and_after_it_is_persisted(
    place: str, inside: str, server: GCSServer
) -> None:
    place = {"gs": "gs://bucket/run", "memory": inside}[place]
    nm.init(place, persistent_time_interval=1000)
    for number in (1, 2):
        state = state_of(number)
        checkpoint = nm.Checkpoint(f"global_step{number}")
        checkpoint.save("model", state)
        state["weight"].zero_()  # the caller may change it
    assert latest().tag == "global_step2"
    assert is_state_of(2, latest().load("model"))
    nm.flush_persistence()
    listed = nm.list_checkpoints()
    assert json.loads(json.dumps(listed)) == listed
    assert list(listed) == ["global_step2", "global_step1"]
    assert listed["global_step2"]["places"] == ["memory", "storage"]
    assert listed["global_step2"]["files"] == ["model"]
    nm.shutdown()
    if not place.startswith("memory:"):
        nm.init(place)
        assert nm.list_checkpoints()["global_step2"]["places"] == ["storage"]
        assert is_state_of(2, latest().load("model", map_location="cpu", weights_only=True))


@pytest.mark.parametrize("is_local", [True, False], ids=["file", "memory"])
def test_a_persistent_part_has_a_path_that_torch_load_takes(
    inside: str, tmp_path: Path, is_local: bool
) -> None:
    place = str(tmp_path / "100%41") if is_local else inside
    nm.init(place, persistent_time_interval=1000)
    commit("best", 1, "checkpoint")
    commit("other", 2, "something")
    nm.flush_persistence("best")
    path = nm.get_latest_checkpoint_path("checkpoint", place)
    assert path is not None
    if is_local:
        assert is_state_of(1, torch.load(path))
    else:
        assert is_state_of(1, load(path))


def test_a_tag_is_a_checkpoint_like_all_others(node: Path, tmp_path: Path) -> None:
    """`aioflux ckpt` and stock DCP know it."""
    place = str(tmp_path / "tier3")
    nm.init(place, persistent_time_interval=0)
    checkpoint = nm.Checkpoint("any tag/7", 2)
    checkpoint.save("model", state_of(7))
    checkpoint.save("step", {"number": 7})
    nm.flush_persistence()
    uri = f"file://{place}/any tag%252F7"
    found = verify(uri, deep=True)
    assert found.is_valid, found.problems
    assert found.num_objects == 2
    from aioflux.checkpoint.dcp import load_state

    loaded = load_state(uri)
    assert is_state_of(7, loaded["model"])
    assert loaded["step"] == {"number": 7}


def test_a_tag_is_complete_with_its_number_of_files(inside: str) -> None:
    nm.init(inside)
    checkpoint = nm.Checkpoint("a", 2)
    checkpoint.save("x", 1)
    assert nm.get_latest_checkpoint() is None
    nm.Checkpoint("a", 2).save("y", 2)  # another process of the node would say so
    assert [latest().load(name) for name in "xy"] == [1, 2]


def test_minus_two_means_complete_at_commit(inside: str) -> None:
    nm.init(inside)
    checkpoint = nm.Checkpoint("a", -2)
    checkpoint.save("x", 1)
    checkpoint.save("y", 2)
    assert nm.get_latest_checkpoint() is None
    assert checkpoint.commit() is True
    assert [latest().load(name) for name in "xy"] == [1, 2]
    assert checkpoint.load("x") == 1


def test_commit_completes_a_tag_with_fewer_files(inside: str) -> None:
    nm.init(inside)
    checkpoint = nm.Checkpoint("a", 5)
    checkpoint.save("x", 1)
    assert checkpoint.commit()
    assert latest().load("x") == 1


def test_commit_of_nothing_raises(inside: str) -> None:
    nm.init(inside)
    with pytest.raises(CheckpointError, match="nothing to commit"):
        nm.Checkpoint("a", -2).commit()


def test_commit_raises_errors_of_saves(inside: str) -> None:
    nm.init(inside)
    checkpoint = nm.Checkpoint("a", -2)
    checkpoint.save("x", 1)
    with pytest.raises(Exception, match="lambda"):
        checkpoint.save("y", lambda: 1)
    with pytest.raises(CheckpointError, match="'y'"):
        checkpoint.commit()
    assert nm.get_latest_checkpoint() is None


def test_a_tag_is_replaced_when_the_new_one_is_complete(inside: str) -> None:
    nm.init(inside, persistent_time_interval=0)
    commit("a", 1)
    nm.flush_persistence()
    other = nm.Checkpoint("a", 2)
    other.save("model", state_of(2))
    assert is_state_of(1, latest().load("model"))
    other.save("more", 2)
    assert is_state_of(2, latest().load("model"))


def test_missing_tags_and_parts(inside: str) -> None:
    nm.init(inside)
    assert nm.get_latest_checkpoint() is None
    assert nm.get_checkpoint(tag="a") is None
    assert nm.list_checkpoints() == {}
    assert nm.get_latest_checkpoint_path("checkpoint", inside) is None
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint 'a'"):
        nm.Checkpoint("a").load("x")
    commit("a", 1)
    with pytest.raises(CheckpointNotFoundError, match="it has model"):
        latest().load("other")
    with pytest.raises(CheckpointError, match="not in memory"):
        nm.flush_persistence("b")


@pytest.mark.parametrize("number", [0, -1, -3])
def test_invalid_numbers_of_files_are_rejected(number: int) -> None:
    with pytest.raises(ValueError, match="num_of_files"):
        nm.Checkpoint("a", number)


def test_a_checkpoint_without_a_tag_makes_one(inside: str) -> None:
    nm.init(inside)
    checkpoint = nm.Checkpoint()
    checkpoint.save("x", 1)
    assert latest().tag == checkpoint.tag != ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"persistent_time_interval": -1}, "persistent_time_interval"),
        ({"num_of_version_in_retention": 0}, "num_of_version_in_retention"),
        ({"memory_buffer_size": "much"}, "memory_buffer_size"),
        ({"local_storage_path": "gs://bucket"}, "local_storage_path"),
        ({"persistent_storage_path": "ftp://x"}, "not a uri"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_out_of_range_are_rejected(
    node: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        nm.init(**arguments)


def test_versions_between_two_intervals_stay_in_memory(inside: str) -> None:
    nm.init(inside, persistent_time_interval=1000, num_of_version_in_retention=2)
    commit("a", 0)
    nm.flush_persistence()
    for number in range(1, 5):
        commit(f"b{number}", number)
    listed = nm.list_checkpoints()
    assert list(listed) == ["b4", "b3", "a"]
    assert listed["b4"]["places"] == ["memory"]
    assert listed["a"]["places"] == ["storage"]


def test_without_an_interval_all_versions_are_saved(inside: str) -> None:
    """Also those that leave the memory, which keeps two of them, before they are saved."""
    nm.init(inside, persistent_time_interval=0, num_of_version_in_retention=2)
    for number in range(5):
        commit(f"a{number}", number)
    nm.flush_persistence()
    places = {tag: each["places"] for tag, each in nm.list_checkpoints().items()}
    assert set(places) == {f"a{number}" for number in range(5)}
    assert all("storage" in each for each in places.values())


def test_the_history_has_duration_throughput_and_size(inside: str) -> None:
    nm.init(inside, persistent_time_interval=0)
    for number in (1, 2):
        commit(f"global_step{number}", number)
        nm.flush_persistence()
    with aioflux.sync.open_store(inside) as store:
        text = store.get("nebula/checkpointHistories.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["tag"], row["outcome"]) for row in rows] == [
        ("global_step1", "committed"),
        ("global_step2", "committed"),
    ]
    assert int(rows[0]["size_bytes"]) > 300 * 100 * 4
    assert float(rows[0]["duration_seconds"]) > 0
    assert int(rows[0]["throughput_bytes_per_second"]) > 0


def test_the_local_disk_keeps_the_newest_and_is_searched_before_the_bucket(
    inside: str, tmp_path: Path
) -> None:
    nm.init(inside, 0, 2, local_storage_path=tmp_path)
    for number in range(4):
        commit(f"global_step{number}", number)
        nm.flush_persistence()
    nm.shutdown()
    nm.init(inside, local_storage_path=tmp_path)
    listed = nm.list_checkpoints()
    assert [each["places"] for each in listed.values()] == [
        ["disk", "storage"],
        ["disk", "storage"],
        ["storage"],
        ["storage"],
    ]
    assert is_state_of(3, latest().load("model"))


def test_a_damaged_tier_is_skipped(inside: str, tmp_path: Path) -> None:
    nm.init(inside, 0, local_storage_path=tmp_path)
    commit("a", 1)
    nm.flush_persistence()
    nm.shutdown()
    nm.init(inside, local_storage_path=tmp_path)
    (part,) = tmp_path.rglob("part-model")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert is_state_of(1, latest().load("model"))
    part.unlink()
    assert is_state_of(1, latest().load("model"))


def test_memory_does_not_bring_back_what_was_removed(inside: str) -> None:
    nm.init(inside, 0)
    commit("a", 1)
    nm.flush_persistence()
    with aioflux.sync.open_store(inside) as store:
        store.delete("a/.metadata")
    assert nm.get_latest_checkpoint() is None


def test_a_failed_save_is_reported_by_flush_and_history(node: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("in the way")
    nm.init(tmp_path, 0)
    commit("a", 1)
    with pytest.raises(CheckpointError, match="a was not saved"):
        nm.flush_persistence()
    assert is_state_of(1, latest().load("model"))
    (tmp_path / "a").unlink()
    nm.flush_persistence()
    assert nm.list_checkpoints()["a"]["places"] == ["memory", "storage"]


def test_a_found_checkpoint_is_loaded_from_where_it_is_now(inside: str) -> None:
    nm.init(inside, 1000)
    commit("first", 0)
    nm.flush_persistence()
    commit("a", 1)
    found, before = nm.get_checkpoint("a"), nm.Checkpoint("a")
    assert found is not None
    assert is_state_of(1, before.load("model"))
    nm.flush_persistence()
    for tag in ("b", "c"):
        commit(tag, 2)
        nm.flush_persistence()
    assert "memory" not in nm.list_checkpoints()["a"]["places"]
    assert is_state_of(1, found.load("model"))
    commit("a", 3)
    nm.flush_persistence()
    for tag in ("b", "c"):
        commit(tag, 2)
        nm.flush_persistence()
    with pytest.raises(CheckpointError):
        found.load("model")  # that save does not exist any more; no other is loaded
    assert is_state_of(3, before.load("model"))


def test_a_tag_is_seen_to_grow(inside: str) -> None:
    nm.init(inside, 1000)
    checkpoint = nm.Checkpoint("a")
    checkpoint.save("model", 1)
    assert checkpoint.load("model") == 1
    nm.Checkpoint("a").save("optimizer", 2)
    assert checkpoint.load("optimizer") == 2


def test_what_is_saved_after_all_is_no_failure(inside: str) -> None:
    nm.init(inside, 1000)
    checkpoint = nm.Checkpoint("a", -2)
    with pytest.raises(TypeError, match="cannot be pickled"):
        checkpoint.save("model", lambda: 1)
    checkpoint.save("model", 1)
    assert checkpoint.commit()


def test_what_is_no_tag_is_left_alone(node: Path, tmp_path: Path) -> None:
    nm.init(tmp_path / "tier3", 0)
    commit("a", 1)
    nm.flush_persistence()
    for name in (
        "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 80,
        "%zz",
        "x%2fy",
        os.fsdecode(b"\xff"),
    ):
        (tmp_path / "tier3" / name).mkdir()
        (tmp_path / "tier3" / name / "x").write_text("x")
    assert list(nm.list_checkpoints()) == ["a"]


def test_another_storage_gets_no_credentials_of_the_first(
    node: Path, server: GCSServer, tmp_path: Path
) -> None:
    nm.init("gs://bucket/run", 0, endpoint_url=server.url)
    assert nm.get_latest_checkpoint(persist_path=tmp_path) is None
    assert nm.get_latest_checkpoint_path("model", tmp_path) is None


def test_a_part_that_does_not_fit_in_memory_is_copied_to_the_disk(inside: str) -> None:
    nm.init(inside, 1000, memory_buffer_size=100_000)
    commit("a", 1)
    assert is_state_of(1, latest().load("model"))
    nm.flush_persistence()
    commit("b", 2)
    assert is_state_of(2, latest().load("model"))


def test_another_storage_is_read_without_changes_to_this_one(inside: str) -> None:
    nm.init(f"{inside}-old", 0)
    commit("before", 1)
    nm.shutdown()
    nm.init(inside)
    commit("now", 2)
    found = nm.get_latest_checkpoint(persist_path=f"{inside}-old")
    assert found is not None
    assert found.tag == "before"
    assert is_state_of(1, found.load("model"))
    again = nm.get_checkpoint(tag="before", persist_path=f"{inside}-old")
    assert again is not None
    assert latest().tag == "now"


def test_private_names_of_nebula_are_there() -> None:
    assert nm._shutdown is nm.shutdown
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        nm.other  # noqa: B018


def test_the_alias_is_what_deepspeed_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_nebula", "nebulaml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    nm.install_alias()
    try:
        import nebulaml  # type: ignore[import-not-found]
        import torch_nebula  # type: ignore[import-not-found]

        assert torch_nebula.Checkpoint is nm.Checkpoint
        assert nebulaml is torch_nebula
        nm.install_alias()  # twice does no harm
    finally:
        for name in ("torch_nebula", "nebulaml"):
            sys.modules.pop(name, None)


def test_the_alias_does_not_replace_another_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_nebula", json)
    with pytest.raises(ImportError, match="torch_nebula is imported already"):
        nm.install_alias("torch_nebula")

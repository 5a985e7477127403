"""The memory of a node: one budget for all processes, and no version is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioflux.compat.nebula._memory_tier import COMMITTED, GROWING, MemoryTier, Segment, Version

MIB = 1024 * 1024


def keep(
    memory: MemoryTier, owner: int, tag: str, name: str, size: int, num_files: int = 1
) -> Version:
    """Add a part as a trainer does, and complete its version when all parts are there."""
    found = memory.allocate(owner, size)
    assert found.segment is not None, "there was no room"
    version = memory.add_part(owner, found.segment.number, (tag, name, size), num_files, 0.1)
    if memory.has_all_parts(version):
        memory.complete(version, f"{len(tag):03}-{tag}-{id(version)}")
    return version


def test_one_process_may_take_all_of_the_budget() -> None:
    memory = MemoryTier(200 * MIB)
    for number in range(4):
        assert memory.allocate(1, 50 * MIB).kind == "new", number
    assert memory.used_bytes == 200 * MIB


def test_four_processes_share_what_there_is_as_they_need_it() -> None:
    memory = MemoryTier(200 * MIB)
    sizes = [110 * MIB, 40 * MIB, 30 * MIB, 20 * MIB]
    assert [memory.allocate(owner, size).kind for owner, size in enumerate(sizes, 1)] == ["new"] * 4


def test_a_free_segment_is_reused_by_its_owner() -> None:
    memory = MemoryTier(100 * MIB, retention=1, num_tiers=0)
    keep(memory, 1, "a", "x", MIB)
    keep(memory, 1, "b", "x", MIB)
    assert memory.allocate(1, MIB).kind == "reuse"


def test_there_are_as_many_segments_as_kept_versions() -> None:
    """Warm memory is reused: two copies for two versions, and no third for the next."""
    memory = MemoryTier(100 * MIB, retention=2, num_tiers=0)
    for tag in "abcdef":
        keep(memory, 1, tag, "x", MIB)
    assert len(memory.segments) == 2
    assert [version.tag for version in memory.versions] == ["e", "f"]


def test_free_segments_are_freed_for_another_process() -> None:
    memory = MemoryTier(3 * MIB, retention=1, num_tiers=0)
    for tag in "ab":
        keep(memory, 1, tag, "x", MIB)
    assert memory.allocate(2, 2 * MIB).kind == "new"
    assert [segment.owner for segment in memory.freed] == [1]


def test_a_version_that_is_saved_nowhere_else_is_kept() -> None:
    memory = MemoryTier(MIB)
    version = keep(memory, 1, "a", "x", MIB)
    assert memory.allocate(1, MIB).kind == "wait"
    assert version.must_save
    memory.set_saved(version, "storage")
    assert memory.allocate(1, MIB).segment is not None


def test_without_a_storage_the_newest_version_stays_and_the_disk_is_used() -> None:
    memory = MemoryTier(MIB, num_tiers=0)
    version = keep(memory, 1, "a", "x", MIB)
    found = memory.allocate(1, MIB)
    assert found.kind == "disk"
    assert memory.versions == [version]


def test_no_trainer_waits_for_a_version_that_could_not_be_saved() -> None:
    memory = MemoryTier(MIB)
    version = keep(memory, 1, "a", "x", MIB)
    memory.allocate(1, MIB)
    memory.set_saved(version, "storage", "the bucket is gone")
    assert memory.allocate(1, MIB).kind == "disk"


def test_no_trainer_waits_for_a_retry() -> None:
    """Otherwise each save would take as long as the retries."""
    memory = MemoryTier(MIB)
    version = keep(memory, 1, "a", "x", MIB)
    memory.set_saved(version, "storage", "the bucket is gone")
    version.num_readers = 1
    assert memory.allocate(1, MIB).kind == "disk"
    version.failures.clear()  # as a flush does
    assert memory.allocate(1, MIB).kind == "wait"


def test_a_part_larger_than_the_budget_goes_to_the_disk() -> None:
    assert MemoryTier(MIB).allocate(1, 2 * MIB).kind == "disk"


def test_an_upload_keeps_its_memory() -> None:
    memory = MemoryTier(MIB, retention=1)
    version = keep(memory, 1, "a", "x", MIB)
    version.saved_in.add("storage")
    version.num_readers = 1
    assert memory.allocate(1, MIB).kind == "wait"
    version.num_readers = 0
    assert memory.allocate(1, MIB).segment is not None


def test_a_tag_is_complete_with_its_number_of_files() -> None:
    memory = MemoryTier(MIB)
    assert not keep(memory, 1, "a", "x", 1, num_files=2).save_id
    assert keep(memory, 2, "a", "y", 1, num_files=2).save_id


def test_a_tag_grows_without_a_number_of_files() -> None:
    memory = MemoryTier(MIB)
    keep(memory, 1, "a", "x", 1, num_files=GROWING)
    keep(memory, 1, "a", "y", 1, num_files=GROWING)
    newest = memory.newest
    assert newest is not None
    assert sorted(newest.parts) == ["x", "y"]
    assert len(memory.versions) == 1


def test_a_repeated_part_starts_a_new_version() -> None:
    memory = MemoryTier(MIB)
    for name in ("x", "y", "x"):
        keep(memory, 1, "a", name, 1, num_files=GROWING)
    newest = memory.newest
    assert newest is not None
    assert list(newest.parts) == ["x"]


def test_unfinished_parts_of_a_dead_trainer_are_removed() -> None:
    memory = MemoryTier(10 * MIB)
    done = keep(memory, 1, "a", "x", MIB)
    keep(memory, 1, "b", "x", MIB, num_files=COMMITTED)
    memory.allocate(1, MIB)
    memory.remove_owner(1)
    assert memory.versions == [done]
    assert not memory.open
    assert memory.used_bytes == MIB


def test_parts_of_several_ranks_stay_while_one_of_them_lives() -> None:
    memory = MemoryTier(10 * MIB)
    for owner in (1, 2):
        keep(memory, owner, "a", f"rank{owner}", MIB, num_files=COMMITTED)
    memory.remove_owner(1)
    assert set(memory.open["a"].parts) == {"rank1", "rank2"}


def test_a_version_of_a_trainer_that_ended_is_completed_by_the_others() -> None:
    memory = MemoryTier(10 * MIB)
    keep(memory, 1, "a", "rank1", MIB, num_files=2)
    memory.remove_owner(1, is_last=False)
    keep(memory, 2, "a", "rank2", MIB, num_files=2)
    assert set(memory.versions[-1].parts) == {"rank1", "rank2"}


def test_no_version_is_made_of_two_runs() -> None:
    memory = MemoryTier(10 * MIB)
    keep(memory, 1, "a", "rank1", MIB, num_files=2)
    keep(memory, 1, "b", "rank1", MIB, num_files=2)
    keep(memory, 2, "b", "rank2-1", MIB, num_files=3)
    memory.remove_owner(1, is_last=False)
    memory.remove_orphaned_parts()
    assert list(memory.open) == ["b"]
    assert set(memory.open["b"].parts) == {"rank2-1"}
    assert memory.used_bytes == MIB


def test_a_cancelled_segment_is_free_again() -> None:
    memory = MemoryTier(MIB)
    found = memory.allocate(1, MIB)
    assert found.segment is not None
    memory.cancel(found.segment.number)
    memory.cancel(99)  # an unknown number has no effect
    assert memory.allocate(1, MIB).kind == "reuse"


def test_a_segment_that_its_trainer_could_not_create_is_not_reused() -> None:
    memory = MemoryTier(MIB)
    found = memory.allocate(1, MIB)
    assert found.segment is not None
    memory.cancel(found.segment.number, is_created=False)
    assert memory.freed == [found.segment]
    assert memory.allocate(1, MIB).kind == "new"


def test_a_version_that_is_being_saved_stays_when_its_tag_grows_or_is_removed() -> None:
    """Then the parts of both stay as long as one of them has them."""
    memory = MemoryTier(4 * MIB, retention=5)
    before = keep(memory, 1, "a", "x", MIB, num_files=GROWING)
    before.num_readers = 1
    after = keep(memory, 1, "a", "y", MIB, num_files=GROWING)
    memory.remove("a")
    assert memory.versions == [before, after]
    before.num_readers = 0
    memory.set_saved(before, "storage")
    assert memory.allocate(2, 3 * MIB).kind == "wait"
    assert memory.versions == [after]
    assert after.parts["x"].segment in memory.segments.values()


def test_a_segment_stays_while_it_is_loaded() -> None:
    memory = MemoryTier(2 * MIB, retention=1, num_tiers=0)
    version = keep(memory, 1, "a", "x", MIB)
    segment = version.parts["x"].segment
    segment.num_readers = 1
    keep(memory, 1, "b", "x", MIB)
    assert version in memory.versions
    assert memory.allocate(1, MIB).kind == "wait"
    memory.release(segment)
    assert memory.allocate(1, MIB).segment is segment


def test_a_tag_is_removed_unless_it_is_the_newest() -> None:
    memory = MemoryTier(10 * MIB, retention=5)
    for tag in "ab":
        keep(memory, 1, tag, "x", MIB)
    memory.remove_owner(1)
    memory.remove("a")
    memory.remove("b")
    assert [version.tag for version in memory.versions] == ["b"]
    assert memory.used_bytes == MIB
    assert memory.versions[0].num_bytes == MIB
    assert memory.find("a") is None
    assert memory.find("b", "another save") is None


def test_a_version_is_evicted_as_a_whole() -> None:
    memory = MemoryTier(4 * MIB, retention=3)
    for name in "xy":
        version = keep(memory, 1, "a", name, MIB, num_files=2)
    memory.set_saved(version, "storage")
    assert memory.allocate(2, 4 * MIB).kind == "new"
    assert not memory.versions


def test_a_due_version_stays_until_every_tier_has_it() -> None:
    memory = MemoryTier(10 * MIB, retention=1, num_tiers=2)
    version = keep(memory, 1, "a", "x", MIB)
    version.must_save = True
    memory.set_saved(version, "disk")
    keep(memory, 1, "b", "x", MIB)
    assert version in memory.versions
    memory.set_saved(version, "storage")
    assert version not in memory.versions


def test_retention_keeps_due_versions() -> None:
    memory = MemoryTier(10 * MIB, retention=1)
    first = keep(memory, 1, "a", "x", MIB)
    first.must_save = True
    keep(memory, 1, "b", "x", MIB)
    assert first in memory.versions
    memory.set_saved(first, "storage")
    assert first not in memory.versions


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from("abc"), st.integers(1, 40), st.booleans()),
        max_size=60,
    )
)
def test_the_budget_holds_and_the_newest_version_is_never_lost(
    saves: list[tuple[int, str, int, bool]],
) -> None:
    memory = MemoryTier(100)
    for owner, tag, size, is_saved in saves:
        before = memory.newest
        found = memory.allocate(owner, size)
        assert memory.used_bytes <= 100
        if found.segment is None:
            waiting = [each for each in memory.versions if each.must_save and not each.saved_in]
            assert waiting, "it waits for nothing"
            for each in waiting:
                memory.set_saved(each, "storage")
            found = memory.allocate(owner, size)
        elif before is not None and not before.saved_in:
            assert memory.newest is before
        segment: Segment | None = found.segment
        assert segment is not None
        version = memory.add_part(owner, segment.number, (tag, "x", size), 1, 0.0)
        memory.complete(version, f"{id(version)}")
        if is_saved:
            memory.set_saved(version, "storage")
        held = {part.segment for each in memory.versions for part in each.parts.values()}
        assert held <= set(memory.segments.values())
        assert memory.newest is version

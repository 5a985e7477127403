"""What memory holds: one budget for all, of which nothing is wasted and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioflux.compat.nebula._memory_tier import COMMITTED, GROWING, Piece, Shelf, Version

MIB = 1024 * 1024


def keep(shelf: Shelf, owner: int, tag: str, name: str, size: int, num_files: int = 1) -> Version:
    """Put a part as a trainer does, and complete its version where it is full."""
    grant = shelf.ask(owner, size)
    assert grant.piece is not None, "there was no room"
    version = shelf.put(owner, grant.piece.number, (tag, name, size), num_files, 0.1)
    if shelf.is_full(version):
        shelf.close(version, f"{len(tag):03}-{tag}-{id(version)}")
    return version


def test_one_process_may_take_all_of_the_budget() -> None:
    shelf = Shelf(200 * MIB)
    for number in range(4):
        assert shelf.ask(1, 50 * MIB).kind == "new", number
    assert shelf.used_bytes == 200 * MIB


def test_four_processes_share_what_there_is_as_they_need_it() -> None:
    shelf = Shelf(200 * MIB)
    sizes = [110 * MIB, 40 * MIB, 30 * MIB, 20 * MIB]
    assert [shelf.ask(owner, size).kind for owner, size in enumerate(sizes, 1)] == ["new"] * 4


def test_what_is_free_is_used_again_by_its_owner() -> None:
    shelf = Shelf(100 * MIB, retention=1, num_places=0)
    keep(shelf, 1, "a", "x", MIB)
    keep(shelf, 1, "b", "x", MIB)
    assert shelf.ask(1, MIB).kind == "reuse"


def test_as_many_pieces_as_versions_are_kept_are_enough() -> None:
    """Warm memory is used again: two copies for two versions, and no third for the next."""
    shelf = Shelf(100 * MIB, retention=2, num_places=0)
    for tag in "abcdef":
        keep(shelf, 1, tag, "x", MIB)
    assert len(shelf.pieces) == 2
    assert [version.tag for version in shelf.versions] == ["e", "f"]


def test_what_is_free_gives_way_to_another_process() -> None:
    shelf = Shelf(3 * MIB, retention=1, num_places=0)
    for tag in "ab":
        keep(shelf, 1, tag, "x", MIB)
    assert shelf.ask(2, 2 * MIB).kind == "new"
    assert [piece.owner for piece in shelf.dropped] == [1]


def test_a_version_that_is_nowhere_else_is_kept_and_waited_for() -> None:
    shelf = Shelf(MIB)
    version = keep(shelf, 1, "a", "x", MIB)
    assert shelf.ask(1, MIB).kind == "wait"
    assert version.is_due
    shelf.saved(version, "storage")
    assert shelf.ask(1, MIB).piece is not None


def test_without_a_storage_the_newest_version_stays_and_the_disk_helps() -> None:
    shelf = Shelf(MIB, num_places=0)
    version = keep(shelf, 1, "a", "x", MIB)
    grant = shelf.ask(1, MIB)
    assert grant.kind == "disk"
    assert shelf.versions == [version]


def test_what_could_not_be_saved_is_not_waited_for_for_ever() -> None:
    shelf = Shelf(MIB)
    version = keep(shelf, 1, "a", "x", MIB)
    shelf.ask(1, MIB)
    shelf.saved(version, "storage", "the bucket is gone")
    assert shelf.ask(1, MIB).kind == "disk"


def test_nobody_waits_for_another_try_of_what_could_not_be_saved() -> None:
    """Else each save of a training would last as long as a store that is away is asked."""
    shelf = Shelf(MIB)
    version = keep(shelf, 1, "a", "x", MIB)
    shelf.saved(version, "storage", "the bucket is gone")
    version.num_readers = 1
    assert shelf.ask(1, MIB).kind == "disk"
    version.failures.clear()  # as a flush does
    assert shelf.ask(1, MIB).kind == "wait"


def test_a_part_larger_than_the_budget_goes_to_the_disk() -> None:
    assert Shelf(MIB).ask(1, 2 * MIB).kind == "disk"


def test_an_upload_keeps_its_memory() -> None:
    shelf = Shelf(MIB, retention=1)
    version = keep(shelf, 1, "a", "x", MIB)
    version.places.add("storage")
    version.num_readers = 1
    assert shelf.ask(1, MIB).kind == "wait"
    version.num_readers = 0
    assert shelf.ask(1, MIB).piece is not None


def test_a_tag_is_complete_with_its_number_of_files() -> None:
    shelf = Shelf(MIB)
    assert not keep(shelf, 1, "a", "x", 1, num_files=2).is_complete
    assert keep(shelf, 2, "a", "y", 1, num_files=2).is_complete


def test_a_tag_grows_where_no_number_is_given() -> None:
    shelf = Shelf(MIB)
    keep(shelf, 1, "a", "x", 1, num_files=GROWING)
    keep(shelf, 1, "a", "y", 1, num_files=GROWING)
    newest = shelf.newest
    assert newest is not None
    assert sorted(newest.parts) == ["x", "y"]
    assert len(shelf.versions) == 1


def test_a_part_that_comes_again_begins_a_tag_anew() -> None:
    shelf = Shelf(MIB)
    for name in ("x", "y", "x"):
        keep(shelf, 1, "a", name, 1, num_files=GROWING)
    newest = shelf.newest
    assert newest is not None
    assert list(newest.parts) == ["x"]


def test_a_trainer_that_dies_takes_along_what_it_had_not_finished() -> None:
    shelf = Shelf(10 * MIB)
    done = keep(shelf, 1, "a", "x", MIB)
    keep(shelf, 1, "b", "x", MIB, num_files=COMMITTED)
    shelf.ask(1, MIB)
    shelf.leave(1)
    assert shelf.versions == [done]
    assert not shelf.open
    assert shelf.used_bytes == MIB


def test_what_several_ranks_put_stays_while_one_of_them_lives() -> None:
    shelf = Shelf(10 * MIB)
    for owner in (1, 2):
        keep(shelf, owner, "a", f"rank{owner}", MIB, num_files=COMMITTED)
    shelf.leave(1)
    assert set(shelf.open["a"].parts) == {"rank1", "rank2"}


def test_what_somebody_put_who_ended_is_completed_by_the_others() -> None:
    shelf = Shelf(10 * MIB)
    keep(shelf, 1, "a", "rank1", MIB, num_files=2)
    shelf.leave(1, is_last=False)
    keep(shelf, 2, "a", "rank2", MIB, num_files=2)
    assert set(shelf.versions[-1].parts) == {"rank1", "rank2"}


def test_no_version_is_made_of_two_runs() -> None:
    shelf = Shelf(10 * MIB)
    keep(shelf, 1, "a", "rank1", MIB, num_files=2)
    keep(shelf, 1, "b", "rank1", MIB, num_files=2)
    keep(shelf, 2, "b", "rank2-1", MIB, num_files=3)
    shelf.leave(1, is_last=False)
    shelf.arrive()
    assert list(shelf.open) == ["b"]
    assert set(shelf.open["b"].parts) == {"rank2-1"}
    assert shelf.used_bytes == MIB


def test_what_was_not_copied_after_all_is_free_again() -> None:
    shelf = Shelf(MIB)
    grant = shelf.ask(1, MIB)
    assert grant.piece is not None
    shelf.abandon(grant.piece.number)
    shelf.abandon(99)  # nobody knows it any more
    assert shelf.ask(1, MIB).kind == "reuse"


def test_what_somebody_loads_stays_until_it_is_loaded() -> None:
    shelf = Shelf(2 * MIB, retention=1, num_places=0)
    version = keep(shelf, 1, "a", "x", MIB)
    piece = version.parts["x"].piece
    piece.num_readers = 1
    keep(shelf, 1, "b", "x", MIB)
    assert version in shelf.versions
    assert shelf.ask(1, MIB).kind == "wait"
    shelf.release(piece)
    assert shelf.ask(1, MIB).piece is piece


def test_a_tag_is_forgotten_but_for_the_newest() -> None:
    shelf = Shelf(10 * MIB, retention=5)
    for tag in "ab":
        keep(shelf, 1, tag, "x", MIB)
    shelf.leave(1)
    shelf.remove("a")
    shelf.remove("b")
    assert [version.tag for version in shelf.versions] == ["b"]
    assert shelf.used_bytes == MIB
    assert shelf.versions[0].num_bytes == MIB
    assert shelf.find("a") is None
    assert shelf.find("b", "another save") is None


def test_all_of_a_version_gives_way_at_once() -> None:
    shelf = Shelf(4 * MIB, retention=3)
    for name in "xy":
        version = keep(shelf, 1, "a", name, MIB, num_files=2)
    shelf.saved(version, "storage")
    assert shelf.ask(2, 4 * MIB).kind == "new"
    assert not shelf.versions


def test_what_is_due_stays_until_it_is_in_every_place() -> None:
    shelf = Shelf(10 * MIB, retention=1, num_places=2)
    version = keep(shelf, 1, "a", "x", MIB)
    version.is_due = True
    shelf.saved(version, "disk")
    keep(shelf, 1, "b", "x", MIB)
    assert version in shelf.versions
    shelf.saved(version, "storage")
    assert version not in shelf.versions


def test_retention_keeps_what_is_due() -> None:
    shelf = Shelf(10 * MIB, retention=1)
    first = keep(shelf, 1, "a", "x", MIB)
    first.is_due = True
    keep(shelf, 1, "b", "x", MIB)
    assert first in shelf.versions
    shelf.saved(first, "storage")
    assert first not in shelf.versions


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from("abc"), st.integers(1, 40), st.booleans()),
        max_size=60,
    )
)
def test_the_budget_holds_and_the_newest_version_is_never_lost(
    saves: list[tuple[int, str, int, bool]],
) -> None:
    shelf = Shelf(100)
    for owner, tag, size, is_saved in saves:
        before = shelf.newest
        grant = shelf.ask(owner, size)
        assert shelf.used_bytes <= 100
        if grant.piece is None:
            waiting = [each for each in shelf.versions if each.is_due and not each.places]
            assert waiting, "it waits for nothing"
            for each in waiting:
                shelf.saved(each, "storage")
            grant = shelf.ask(owner, size)
        elif before is not None and not before.places:
            assert shelf.newest is before
        piece: Piece | None = grant.piece
        assert piece is not None
        version = shelf.put(owner, piece.number, (tag, "x", size), 1, 0.0)
        shelf.close(version, f"{id(version)}")
        if is_saved:
            shelf.saved(version, "storage")
        held = {part.piece for each in shelf.versions for part in each.parts.values()}
        assert held <= set(shelf.pieces.values())
        assert shelf.newest is version

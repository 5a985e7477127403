"""Plans and staging: the same as DCP's, kept while nothing changes, copied once."""

from __future__ import annotations

import io
import mmap
import pickle
import resource
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from aioflux.checkpoint._format.commit import SaveFacts
from aioflux.checkpoint._format.dcp_metadata import (
    ItemLocation,
    add_storage_data,
    pickle_index,
    pickle_metadata,
)
from aioflux.checkpoint._save import staging
from aioflux.checkpoint._save.job import Job
from aioflux.checkpoint._save.plan import CachingPlanner, describe_state
from aioflux.checkpoint._save.ranks import Ranks
from aioflux.checkpoint._save.staging import Arena, Stager
from aioflux.checkpoint._save.tensor_memory import MemoryCopy, copy_all, tensor_address
from aioflux.errors import CheckpointError
from tests.patience import PATIENCE_SECONDS, wait_until

leaves = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.just(torch.ones(2)),
    st.tuples(st.integers(), st.just(torch.ones(1))),
)
states = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(states)
def test_leaves_are_those_of_dcp_in_its_order(state: dict[str, Any]) -> None:
    flat, _ = flatten_state_dict(state)
    found = describe_state(state).leaves
    assert len(found) == len(flat)
    assert all(mine is theirs for mine, theirs in zip(found, flat.values(), strict=True))


JOB = Job(facts=SaveFacts(step=1, save_id="save"), rank=0, started=0.0)


def resolved(planner: CachingPlanner, state: dict[str, Any]) -> Any:
    spec = describe_state(state)
    return planner.plan(spec, is_known=planner.is_known(spec))


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        (lambda state: state["a"].add_(1), False),
        (lambda state: state.update(a=torch.zeros(3)), False),
        (lambda state: state.update(lr=0.2), False),
        (lambda state: state.update(a=torch.zeros(4)), True),
        (lambda state: state.update(a=torch.zeros(3, dtype=torch.float64)), True),
        (lambda state: state.update(more=1), True),
        (lambda state: state["list"].append(torch.ones(1)), True),
        (lambda state: state.update(lr=torch.ones(1)), True),
        (lambda state: state.update(a=state.pop("a")), True),
    ],
    ids=["values", "tensor", "number", "shape", "dtype", "name", "list", "kind", "order"],
)
def test_a_plan_is_kept_while_the_structure_is_the_same(change: Any, is_new: bool) -> None:
    planner = CachingPlanner(Ranks())
    state = {"a": torch.ones(3), "lr": 0.1, "list": [torch.ones(2)]}
    first, _ = resolved(planner, state)
    change(state)
    again, _ = resolved(planner, state)
    assert (again is not first) == is_new
    assert [each.index.fqn for each in again.items if each.is_tensor] == [
        name for name, value in flatten_state_dict(state)[0].items() if torch.is_tensor(value)
    ]


def test_staging_uses_its_memory_again_and_copies_what_changed() -> None:
    planner, stager = CachingPlanner(Ranks()), Stager(1 << 30)
    state = {"a": torch.ones(1000), "b": torch.ones(5, dtype=torch.bool), "lr": 0.1}
    addresses = set()
    for value in (1.0, 2.0, 3.0):
        state["a"].fill_(value)
        state["lr"] = value
        staged, arena = stager.stage(JOB, *resolved(planner, state))
        assert arena is not None
        addresses.add(id(arena))
        item = staged.items[0]
        data = arena.view[item.data_start : item.data_start + item.data_size]
        assert torch.equal(torch.frombuffer(data, dtype=torch.float32), state["a"])
        whole = bytes(arena.view[: staged.arena_bytes]) + b"".join(staged.tail)
        assert staged.num_bytes == len(whole)
        item = staged.items[2]
        told = whole[item.offset : item.offset + item.length]
        assert torch.load(io.BytesIO(told), weights_only=True) == value
        del data
        stager.free(arena)
    assert len(addresses) == 1
    assert stager.used_bytes == 0
    stager.close()


def test_prepared_memory_is_used_by_the_first_save_and_released_at_close() -> None:
    closed: list[int] = []
    planner = CachingPlanner(Ranks())
    stager = Stager(1 << 30, on_drop=lambda arena: closed.append(arena.number))
    plan, content = resolved(planner, {"a": torch.arange(1_000_000)})
    layout = plan.layout
    stager.prepare(layout)
    stager.prepare(layout)
    _, first = stager.stage(JOB, plan, content)
    assert first is not None
    assert (first.number, closed) == (1, [])
    stager.prepare(layout)  # its memory is in use, and is large enough for the next save
    stager.free(first)
    larger, _ = resolved(planner, {"a": torch.ones(5_000_000)})
    stager.prepare(larger.layout)
    assert closed == [1]
    stager.close()
    assert closed == [1, 2]


def test_memory_is_not_prepared_beyond_the_limit_or_without_tensors() -> None:
    stager = Stager(5 << 20)
    _, arena = stager.stage(JOB, *resolved(CachingPlanner(Ranks()), {"a": torch.ones(1_000_000)}))
    assert arena is not None
    larger, _ = resolved(CachingPlanner(Ranks()), {"a": torch.ones(2_000_000)})
    empty, _ = resolved(CachingPlanner(Ranks()), {"lr": 0.1})
    for each in (larger, empty):
        stager.prepare(each.layout)
        assert stager._free == []
    stager.free(arena)
    stager.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for resident pages in /proc")
@pytest.mark.parametrize("is_shared", [False, True])
def test_prepared_memory_is_allocated_in_the_background(is_shared: bool) -> None:
    def page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    arena = Arena(1, 64 << 20, is_shared=is_shared)
    arena.start_populating()
    assert arena._populating is not None
    arena._populating.join()
    before = page_faults()
    arena.view[:: mmap.PAGESIZE] = bytes(arena.size // mmap.PAGESIZE)
    assert page_faults() - before < 1000  # of 16,384 pages
    arena.close()


def test_a_save_stops_the_allocation_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started, may_end = threading.Event(), threading.Event()
    steps: list[int] = []

    def populate(view: memoryview) -> None:
        steps.append(view.nbytes)
        has_started.set()
        may_end.wait()

    monkeypatch.setattr(staging, "populate", populate)
    arena = Arena(1, 64 << 20, is_shared=False)
    arena.start_populating()
    assert has_started.wait(PATIENCE_SECONDS)
    stopping = threading.Thread(target=arena.stop_populating)
    stopping.start()
    wait_until(lambda: arena._is_stopped)
    assert stopping.is_alive()  # the thread still uses the memory
    may_end.set()
    stopping.join(PATIENCE_SECONDS)
    assert len(steps) == 1  # of 16
    arena.close()


def test_memory_is_prepared_without_a_thread_if_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    arena = Arena(1, 2 << 20, is_shared=False)
    arena.start_populating()
    arena.view[0] = 1
    assert bytes(arena.view[:2]) == b"\1\0"
    arena.close()


def test_free_memory_is_bounded_too() -> None:
    closed: list[int] = []
    planner = CachingPlanner(Ranks())
    stager = Stager(5 << 20, on_drop=lambda arena: closed.append(arena.number))
    plan, content = resolved(planner, {"a": torch.ones(1_000_000)})
    layout = plan.layout
    _, first = stager.stage(JOB, plan, content)
    assert not stager.has_memory_for(layout)
    _, second = stager.stage(JOB, plan, content)
    for arena in (first, second):
        assert arena is not None
        stager.free(arena)
    assert closed == [1]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_bytes", [100_000, 3_000_000, 40_000_000])
def test_an_arena_counts_as_what_its_pages_take(num_bytes: int, is_shared: bool) -> None:
    """A copy of 100 KB is not counted, or allocated, as a huge page of 2 MiB."""
    stager = Stager(1 << 30, is_shared=is_shared)
    plan, content = resolved(
        CachingPlanner(Ranks()), {"a": torch.ones(num_bytes, dtype=torch.uint8)}
    )
    layout = plan.layout
    _, arena = stager.stage(JOB, plan, content)
    assert arena is not None
    assert layout.size <= arena.size == stager.used_bytes <= 1.06 * layout.size
    assert arena.size % mmap.PAGESIZE == 0
    stager.max_staged_bytes = 2 * arena.size
    assert stager.has_memory_for(layout)
    stager.max_staged_bytes -= 1
    assert not stager.has_memory_for(layout)
    stager.free(arena)
    stager.close()


def test_two_free_arenas_are_kept_and_the_others_given_back() -> None:
    closed: list[int] = []
    stager = Stager(1 << 30, on_drop=lambda arena: closed.append(arena.number))
    plan, content = resolved(CachingPlanner(Ranks()), {"a": torch.ones(1000)})
    arenas = [stager.stage(JOB, plan, content)[1] for _ in range(5)]
    for arena in arenas:
        assert arena is not None
        stager.free(arena)
    assert closed == [1, 2, 3]
    again = {id(stager.stage(JOB, plan, content)[1]) for _ in range(2)}
    assert again == set(map(id, arenas[3:]))


def test_an_arena_that_cannot_be_allocated_is_an_error_of_the_checkpoint() -> None:
    """Here because the process may open no more files."""
    stager = Stager(1 << 30, is_shared=True)
    plan, content = resolved(CachingPlanner(Ranks()), {"a": torch.ones(1000)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="no memory for a copy of 8,192 bytes"):
            stager.stage(JOB, plan, content)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert stager.used_bytes == 0


def test_what_cannot_be_copied_leaves_its_memory() -> None:
    planner, stager = CachingPlanner(Ranks()), Stager(1 << 30)
    plan, content = resolved(planner, {"a": torch.ones(3), "b": lambda: None})
    with pytest.raises(Exception, match="lambda"):
        stager.stage(JOB, plan, content)
    assert stager.used_bytes == 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [0, 10, 100_000, 20_000_003])
def test_copies_of_every_size(num_threads: int, size: int) -> None:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        copy_all([MemoryCopy(target.data_ptr(), source.data_ptr(), size)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(source, target)


def test_only_bytes_in_a_row_have_an_address() -> None:
    whole = torch.randn(4, 4, dtype=torch.complex64)
    assert tensor_address(whole) == whole.data_ptr()
    assert tensor_address(whole[1:]) == whole[1:].data_ptr()
    for each in (whole.T, whole[:, 1], whole.conj(), whole.imag, torch.empty(3, device="meta")):
        assert tensor_address(each) == 0


@pytest.mark.parametrize("offset", [0, 7, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("transforms", [(), ("stream.zstd/1", "x")])
def test_the_last_piece_of_the_metadata(offset: int, transforms: tuple[str, ...]) -> None:
    indices = [MetadataIndex("a.b", torch.Size([3, 0]), 1), MetadataIndex("c")]
    begun = pickle_metadata(Metadata({}, planner_data={"c": ("c",)}, version="1.0.0"))
    places = [
        (pickle_index(index), ItemLocation("s/__0_0.distcp", offset, 5, transforms))
        for index in indices
    ]
    metadata = pickle.loads(add_storage_data(begun, places))
    told = _StorageInfo("s/__0_0.distcp", offset, 5, list(transforms) or None)
    assert metadata == Metadata(
        {}, planner_data={"c": ("c",)}, storage_data=dict.fromkeys(indices, told), version="1.0.0"
    )
    assert [index.index for index in metadata.storage_data] == [1, None]


def test_an_error_of_the_coordinator_is_raised_on_all_ranks() -> None:
    class TwoRanks(Ranks):
        """Ranks whose broadcasts arrive in `sent`."""

        def __init__(self, rank: int, sent: list[Any]) -> None:
            super().__init__()
            self.rank, self.world_size, self.sent = rank, 2, sent

        def broadcast(self, value: Any) -> Any:
            self.sent += [value] if self.is_coordinator else []
            return pickle.loads(pickle.dumps(self.sent[-1]))

    sent: list[Any] = []
    coordinator, other = TwoRanks(0, sent), TwoRanks(1, sent)
    assert [ranks.on_coordinator(lambda: 7) for ranks in (coordinator, other)] == [7, 7]
    for error in (ValueError("damaged"), CheckpointError("damaged")):

        def fail(error: Exception = error) -> None:
            raise error

        for ranks in (coordinator, other):
            with pytest.raises(CheckpointError, match="damaged"):
                ranks.on_coordinator(fail)
    with pytest.raises(ValueError, match="alone"):
        Ranks().on_coordinator(lambda: int("alone"))

"""A store against a dict, with generations and preconditions, in any order of operations."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import aioflux
from aioflux import sync
from tests.store.places import (
    OTHER_BUCKET,
    FlakyPlace,
    GCSPlace,
    LocalPlace,
    MemoryPlace,
    RemotePlace,
    tls_place,
)

if TYPE_CHECKING:
    from aioflux.testing import GCSServer
    from tests.store.places import Place

OPTIONS = aioflux.TransferOptions(max_in_flight=4, range_size_bytes=7)
KEYS = ["a", "a-b", "b/c", "b/c.d", "b/d/e", "b0", "é", "z z%20"]
keys = st.sampled_from(KEYS)
contents = st.binary(max_size=30)


@dataclass
class Object:
    data: bytes
    meta: aioflux.ObjectMeta


class StoreMachine(RuleBasedStateMachine):
    """The model: what is stored, and the metadata of what was replaced or deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = ExitStack()
        self.place = self.new_place()
        self.store = self.exit.enter_context(sync.Store(self.place.open(transfer=OPTIONS)))
        self.objects: dict[str, Object] = {}
        self.gone: list[aioflux.ObjectMeta] = []

    def new_place(self) -> Place:
        raise NotImplementedError

    def composes(self) -> bool:
        """Return whether the service concatenates objects."""
        return True

    def teardown(self) -> None:
        self.exit.close()

    def stored(self, key: str, data: bytes, meta: aioflux.ObjectMeta) -> None:
        assert (meta.key, meta.size) == (key, len(data))
        assert meta.generation not in {each.meta.generation for each in self.objects.values()}
        assert meta.generation not in {each.generation for each in self.gone}
        if key in self.objects:
            self.gone.append(self.objects[key].meta)
        self.objects[key] = Object(data, meta)

    def fails(self, kind: type[Exception], call: Any, *args: Any, **settings: Any) -> None:
        with pytest.raises(kind):
            call(*args, **settings)

    # --- writes -------------------------------------------------------------------------

    @initialize(data=contents)
    def begin(self, data: bytes) -> None:
        self.stored("a", data, self.store.put("a", data))

    @rule(key=keys, data=contents)
    def put(self, key: str, data: bytes) -> None:
        self.stored(key, data, self.store.put(key, data))

    @rule(key=keys, data=contents)
    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            self.fails(aioflux.AlreadyExistsError, self.store.put, key, data, mode="create")
        else:
            self.stored(key, data, self.store.put(key, data, mode="create"))

    @rule(key=keys, data=contents, pick=st.integers(0, 100))
    def put_if_generation(self, key: str, data: bytes, pick: int) -> None:
        known = [each.meta for each in self.objects.values()] + self.gone
        expected = known[pick % len(known)].generation if known else "1"
        held = self.objects.get(key)
        if held is not None and held.meta.generation == expected:
            meta = self.store.put(key, data, if_generation_match=expected)
            self.stored(key, data, meta)
        else:
            error = aioflux.PreconditionFailedError
            self.fails(error, self.store.put, key, data, if_generation_match=expected)

    @rule(
        key=keys,
        pieces=st.lists(contents, max_size=4),
        mode=st.sampled_from(["overwrite", "create"]),
    )
    def write(self, key: str, pieces: list[bytes], mode: Any) -> None:
        if mode == "create" and key in self.objects:
            self.fails(aioflux.AlreadyExistsError, self.write_pieces, key, pieces, mode)
        else:
            self.stored(key, b"".join(pieces), self.write_pieces(key, pieces, mode))

    def write_pieces(self, key: str, pieces: list[bytes], mode: Any) -> aioflux.ObjectMeta:
        with self.store.open_writer(key, mode=mode) as writer:
            for piece in pieces:
                writer.write(piece)
        return writer.meta

    @rule(pairs=st.dictionaries(keys, contents, max_size=5))
    def put_many(self, pairs: dict[str, bytes]) -> None:
        for meta in self.store.put_many(pairs.items()):
            self.stored(meta.key, pairs[meta.key], meta)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if key in self.objects:
            self.store.delete(key)
            self.gone.append(self.objects.pop(key).meta)
        else:
            self.fails(aioflux.NotFoundError, self.store.delete, key)

    @precondition(lambda self: self.gone)
    @rule(pick=st.integers(0, 100))
    def delete_what_is_gone(self, pick: int) -> None:
        meta = self.gone[pick % len(self.gone)]
        error = (aioflux.NotFoundError, aioflux.PreconditionFailedError)
        self.fails(error, self.store.delete, meta)  # type: ignore[arg-type]

    @rule(chosen=st.lists(keys, max_size=4, unique=True))
    def delete_many(self, chosen: list[str]) -> None:
        result = self.store.delete_many(chosen)
        assert result.deleted == tuple(sorted(key for key in chosen if key in self.objects))
        assert result.missing == tuple(sorted(key for key in chosen if key not in self.objects))
        for key in result.deleted:
            self.gone.append(self.objects.pop(key).meta)

    @precondition(lambda self: self.composes())
    @rule(key=keys, sources=st.lists(keys, min_size=1, max_size=4))
    def compose(self, key: str, sources: list[str]) -> None:
        if all(source in self.objects for source in sources):
            data = b"".join(self.objects[source].data for source in sources)
            self.stored(key, data, self.store.compose(key, sources))
        else:
            self.fails(aioflux.NotFoundError, self.store.compose, key, sources)

    @rule(key=keys, source=keys, mode=st.sampled_from(["overwrite", "create"]))
    def copy(self, key: str, source: str, mode: Any) -> None:
        if source not in self.objects:
            expected = (aioflux.NotFoundError, aioflux.AlreadyExistsError)
            self.fails(expected, self.store.copy, source, key, mode=mode)  # type: ignore[arg-type]
        elif mode == "create" and key in self.objects:
            self.fails(aioflux.AlreadyExistsError, self.store.copy, source, key, mode=mode)
        else:
            data = self.objects[source].data
            self.stored(key, data, self.store.copy(source, key, mode=mode))

    # --- reads --------------------------------------------------------------------------

    @rule(key=keys, start=st.integers(0, 35), size=st.integers(1, 35))
    def read(self, key: str, start: int, size: int) -> None:
        if key not in self.objects:
            for call in (self.store.get, self.store.head):
                self.fails(aioflux.NotFoundError, call, key)
            self.fails(aioflux.NotFoundError, self.store.get_range, key, start=start, end=99)
            return
        held = self.objects[key]
        for name in (key, held.meta):
            assert self.store.get(name) == held.data
            part = self.store.get_range(name, start=start, end=start + size)
            assert part == held.data[start : start + size]
            buffer = bytearray(size)
            count = self.store.get_into(name, buffer, start=start)
            assert buffer[:count] == held.data[start : start + size]
            assert self.store.head(name).generation == held.meta.generation

    @precondition(lambda self: self.gone)
    @rule(pick=st.integers(0, 100))
    def read_what_is_gone(self, pick: int) -> None:
        meta = self.gone[pick % len(self.gone)]
        self.fails(aioflux.NotFoundError, self.store.get, meta)
        self.fails(aioflux.NotFoundError, self.store.head, meta)

    @rule(prefix=st.sampled_from(["", "a", "b/", "b/c", "nothing"]))
    def list(self, prefix: str) -> None:
        listed = self.store.list_all(prefix)
        expected = sorted((key for key in self.objects if key.startswith(prefix)), key=str.encode)
        assert [meta.key for meta in listed] == expected
        for meta in listed:
            assert meta.generation == self.objects[meta.key].meta.generation

    @rule()
    def get_all(self) -> None:
        got = dict(self.store.get_many(self.store.list()))
        assert got == {key: held.data for key, held in self.objects.items()}

    @invariant()
    def the_back_door_agrees(self) -> None:
        for key, held in self.objects.items():
            assert self.place.read(key) == held.data


class MemoryMachine(StoreMachine):
    def new_place(self) -> Place:
        return MemoryPlace("p/")


class LocalMachine(StoreMachine):
    def new_place(self) -> Place:
        directory = self.exit.enter_context(tempfile.TemporaryDirectory())
        return LocalPlace(Path(directory) / "objects")


class FlakyMachine(StoreMachine):
    seed = 0

    def new_place(self) -> Place:
        FlakyMachine.seed += 1
        return FlakyPlace(MemoryPlace(), seed=FlakyMachine.seed)


def check(machine: Any, num_examples: int) -> None:
    if settings.get_current_profile_name() == "nightly":
        num_examples *= 50
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_memory_is_like_a_dict() -> None:
    check(MemoryMachine, 25)


def test_local_is_like_a_dict() -> None:
    check(LocalMachine, 8)


def test_a_flaky_memory_is_like_a_dict() -> None:
    check(FlakyMachine, 8)


def test_gcs_is_like_a_dict(gcs_server: GCSServer) -> None:
    class GCSMachine(StoreMachine):
        def new_place(self) -> Place:
            return GCSPlace(gcs_server)

    check(GCSMachine, 8)


def test_gcs_over_tls_is_like_a_dict(gcs_server_tls: GCSServer) -> None:
    class TLSMachine(StoreMachine):
        def new_place(self) -> Place:
            return tls_place(gcs_server_tls)

    check(TLSMachine, 5)


@pytest.mark.usefixtures("by_proxy")
def test_gcs_through_a_proxy_is_like_a_dict(gcs_server: GCSServer) -> None:
    class ProxyMachine(StoreMachine):
        def new_place(self) -> Place:
            return GCSPlace(gcs_server)

    check(ProxyMachine, 5)


def test_another_server_is_like_a_dict(other_server: str) -> None:
    class OtherMachine(StoreMachine):
        def new_place(self) -> Place:
            place = RemotePlace(other_server, OTHER_BUCKET)
            self.exit.callback(place.close)
            return place

    check(OtherMachine, 5)

"""Generations and the order of names, without HTTP."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing.gcs_server import State
from aioflux.testing.gcs_server._records import SortedNames


def test_generations_never_repeat_even_when_the_clock_stands():
    state = State(clock=lambda: 7)
    state.create_bucket("b")
    seen = []
    for _ in range(5):
        seen.append(state.put("b", "k", [b""]).generation)
        state.delete("b", "k")
    assert seen == sorted(set(seen))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.text(max_size=2)), max_size=80))
def test_names_are_in_utf8_order(changes):
    names: SortedNames[int] = SortedNames()
    model = set()
    for add, look, name in changes:
        if add:
            names.put(name, 1)
            model.add(name)
        elif name in model:
            names.remove(name)
            model.remove(name)
        if look:
            assert names.ordered() == sorted(model, key=str.encode)
    assert names.ordered() == sorted(model, key=str.encode)


def test_many_names_are_removed_at_once():
    names: SortedNames[int] = SortedNames()
    for at in range(200):
        names.put(f"{at:03}", at)
    assert len(names.ordered()) == 200
    for at in range(100):
        names.remove(f"{at:03}")
    assert names.ordered() == [f"{at:03}" for at in range(100, 200)]

"""Pages of a listing as a plain function, against the obvious one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioflux.testing.gcs_server._pages import after, page

NAMES = st.lists(st.text("ab/\U0010ffff", min_size=1, max_size=6), unique=True).map(sorted)
TEXT = st.text("ab/", max_size=2)


def expected(names: list[str], prefix: str, delimiter: str) -> list[str]:
    found: list[str] = []
    for name in names:
        if not name.startswith(prefix):
            continue
        head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        entry = prefix + head + cut if cut else name
        if entry not in found:
            found.append(entry)
    return found


@given(NAMES, TEXT, TEXT, st.integers(1, 4))
def test_pages_together_are_the_whole_listing(names, prefix, delimiter, size):
    """Walking from marker to marker shows each name and common prefix once, in order."""
    found: list[str] = []
    marker = ""
    while True:
        start = after(names, marker, prefix=prefix, delimiter=delimiter)
        part = page(names, prefix=prefix, delimiter=delimiter, start=start, size=size)
        assert len(part) <= size
        found += sorted([*(names[index] for index in part.indices), *part.prefixes])
        if not part.is_truncated:
            break
        assert part.last > marker
        marker = part.last
    assert found == expected(names, prefix, delimiter)


def test_a_page_of_none_is_the_end():
    """size=0 lists nothing, and does not promise more."""
    part = page(["a"], size=0)
    assert (len(part), part.is_truncated) == (0, False)

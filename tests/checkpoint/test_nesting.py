"""The path of a value that cannot be pickled; `dcp/test_dcp_reader.py` tests the rebuilt states."""

from __future__ import annotations

from typing import Any

import pytest

from aioflux.checkpoint._format.nesting import naming_unpicklable


def test_an_error_is_unchanged_if_the_value_can_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"^another reason$"), naming_unpicklable({"step": 1}):
        raise TypeError("another reason")


def test_a_list_that_contains_itself_is_searched_once() -> None:
    values: list[Any] = []
    values += [values, lambda: None]
    with (
        pytest.raises(TypeError, match=r"'losses\.1' cannot be pickled, because it is a function"),
        naming_unpicklable({"losses": values}),
    ):
        raise TypeError("a function")

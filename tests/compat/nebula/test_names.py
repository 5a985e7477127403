"""Tags and names of parts as keys, and values that are no storage path."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from aioflux.checkpoint._format.commit import part_key, part_name, quote_name, step_of, tag_of
from aioflux.checkpoint._format.dcp_metadata import pickle_metadata_of_parts
from aioflux.compat import nebula as nm

ID = "20261122T071145.918Z-f55e2f04"


@given(st.text(min_size=1, max_size=20))
def test_a_tag_is_one_segment_and_comes_back(tag: str) -> None:
    try:
        quoted = quote_name(tag)
    except (UnicodeEncodeError, ValueError):
        return  # no text that any service takes
    assert "/" not in quoted
    assert not quoted.startswith(".")
    assert tag_of(quoted) == tag
    assert part_name(f"tag/{part_key(ID, quoted)}") == tag


def test_common_tags_are_their_own_key() -> None:
    assert quote_name("global_step500") == "global_step500"
    assert quote_name("epoch=1-step=20") == "epoch=1-step=20"


@pytest.mark.parametrize("tag", ["", "x" * 201, "ä" * 100, "." * 300])
def test_a_tag_that_no_disk_takes_is_rejected(tag: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (valid )?tag"):
        quote_name(tag)


def test_a_tag_is_text() -> None:
    with pytest.raises(TypeError, match="must be a string"):
        quote_name(500)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tag", "step"), [("global_step500", 500), ("best", 0), ("7-best", 0), ("12", 12)]
)
def test_the_number_at_the_end_is_the_step(tag: str, step: int) -> None:
    assert step_of(tag) == step


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("given_path", [5, ("a", "b"), b"/tmp"])
def test_other_types_are_no_storage_path(given_path: Any) -> None:
    with pytest.raises(TypeError, match="storage path"):
        nm.init(given_path)


def test_stock_dcp_knows_the_metadata_of_parts() -> None:
    described = pickle.loads(pickle_metadata_of_parts([("a", f"{ID}/part-a", 5)]))
    assert isinstance(described, Metadata)
    assert described.state_dict_metadata == {"a": BytesStorageMetadata()}
    assert described.storage_data is not None
    info = described.storage_data[MetadataIndex("a")]
    assert (info.relative_path, info.offset, info.length) == (f"{ID}/part-a", 0, 5)
    assert pickle.loads(pickle_metadata_of_parts([])).state_dict_metadata == {}

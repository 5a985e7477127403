"""The commit object: what goes in comes out, and no damage goes unseen."""

from __future__ import annotations

import json
import pickle
import struct
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import CheckpointCorruptError
from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.commit import (
    Commit,
    StoredItem,
    StoredObject,
    data_key,
    decode_commit,
    decode_index,
    encode_commit,
    encode_index,
    find_save_id,
    is_save_id,
    new_save_id,
    parse_step,
    plan_block_size,
    step_prefix,
)

SAVE_ID = new_save_id(datetime(2026, 11, 22, 3, 15, 0, 123_456, tzinfo=UTC), "3f9a12cd")
URI = "gs://bucket/run/.metadata"

COMMIT = Commit(
    save_id=SAVE_ID,
    uri="gs://bucket/run/",
    created=1.5,
    world_size=2,
    step=7,
    objects=(
        StoredObject(
            key=data_key(SAVE_ID, 1, 0),
            size=70_000,
            crc32c=5,
            generation="99",
            rank=1,
            block_crcs=b"\1\2\3\4" * 2,
            items=(StoredItem(0, 70_000, 1024, 68_000, 4096, (10, 20), 2),),
        ),
    ),
    metrics={"loss": 0.25},
)
METADATA = pickle.dumps({"a": list(range(50))})
ENCODED = encode_commit(METADATA, COMMIT)
INDEX = {"metadata": {"total_size": 3}, "weight_map": {"w": "model.safetensors"}}
ENCODED_INDEX = encode_index(INDEX, COMMIT)


def test_a_commit_comes_back() -> None:
    assert decode_commit(ENCODED, uri=URI) == (METADATA, COMMIT)


def test_stock_unpickles_it_and_never_sees_the_rest() -> None:
    assert pickle.loads(ENCODED) == {"a": list(range(50))}


def test_a_pickle_alone_is_of_stock() -> None:
    assert decode_commit(METADATA, uri=URI) == (METADATA, None)


def test_each_flipped_bit_of_the_trailer_is_seen() -> None:
    for at in range(len(METADATA), len(ENCODED)):
        for bit in range(8):
            damaged = bytearray(ENCODED)
            damaged[at] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError, match="gs://bucket/run/"):
                decode_commit(bytes(damaged), uri=URI)


def test_each_flipped_byte_of_the_pickle_is_seen() -> None:
    for at in range(len(METADATA)):
        damaged = bytearray(ENCODED)
        damaged[at] ^= 0x10
        with pytest.raises(CheckpointCorruptError):
            decode_commit(bytes(damaged), uri=URI)


def test_cut_off_anywhere_behind_the_pickle_is_seen() -> None:
    for end in range(len(METADATA) + len(b"\0aioflux-commit"), len(ENCODED)):
        with pytest.raises(CheckpointCorruptError):
            decode_commit(ENCODED[:end], uri=URI)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"save_id": 5}', "has an invalid field"),
        (b"{", "is not JSON"),
        (b'{"x": ' + b"[" * 100_000, "is not JSON"),
    ],
)
def test_an_invalid_commit_with_a_valid_checksum_is_damage(text: bytes, what: str) -> None:
    body = METADATA + b"\0aioflux-commit\0" + text
    forged = body + struct.pack(">8sQI", b"aioflux1", len(text), crc32c(body))
    with pytest.raises(CheckpointCorruptError, match=what):
        decode_commit(forged, uri="gs://b/run/.metadata")


def test_a_newer_format_says_what_to_do() -> None:
    newer = encode_commit(METADATA, msgspec.structs.replace(COMMIT, format=2))
    with pytest.raises(CheckpointCorruptError, match="install a newer"):
        decode_commit(newer, uri=URI)


@pytest.mark.parametrize("blocks", [b"", b"\0" * 4, b"\0" * 7, b"\0" * 12])
def test_blocks_that_do_not_fit_are_refused(blocks: bytes) -> None:
    forged = msgspec.structs.replace(COMMIT.objects[0], block_crcs=blocks)
    data = encode_commit(METADATA, msgspec.structs.replace(COMMIT, objects=(forged,)))
    with pytest.raises(CheckpointCorruptError, match="do not fit"):
        decode_commit(data, uri=URI)


def test_a_block_size_of_zero_is_refused() -> None:
    forged = msgspec.structs.replace(COMMIT.objects[0], block_size=0)
    data = encode_commit(METADATA, msgspec.structs.replace(COMMIT, objects=(forged,)))
    with pytest.raises(CheckpointCorruptError):
        decode_commit(data, uri=URI)


def test_an_index_comes_back() -> None:
    index, commit = decode_index(ENCODED_INDEX, uri=URI)
    assert commit == COMMIT
    assert index["weight_map"] == INDEX["weight_map"]
    assert index["metadata"]["total_size"] == 3


def test_an_index_of_another_program_is_not_changed() -> None:
    assert decode_index(json.dumps(INDEX).encode(), uri=URI) == (INDEX, None)


def test_each_damaged_byte_of_an_index_is_seen_or_means_nothing() -> None:
    for at in range(len(ENCODED_INDEX)):
        damaged = bytearray(ENCODED_INDEX)
        damaged[at] ^= 0x01
        try:
            index, commit = decode_index(bytes(damaged), uri=URI)
        except CheckpointCorruptError:
            continue
        assert commit == COMMIT
        assert index == decode_index(ENCODED_INDEX, uri=URI)[0]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"weight_map": 3}', b"{"])
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_index(data, uri=URI)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reading(data: bytes) -> None:
    for read in (decode_commit, decode_index):
        try:
            read(data, uri=URI)
        except CheckpointCorruptError:
            continue


@given(st.integers(0, 1 << 60))
def test_blocks_are_few_and_powers_of_two(size: int) -> None:
    block = plan_block_size(size)
    assert block & (block - 1) == 0
    assert block >= 64 * 1024
    assert -(-size // block) <= 65_536


def test_save_ids() -> None:
    assert SAVE_ID == "20261122T031500.123Z-3f9a12cd"
    assert is_save_id(SAVE_ID)
    assert not is_save_id(SAVE_ID + "0")
    assert find_save_id(data_key(SAVE_ID, 3, 1)) == SAVE_ID
    assert find_save_id(f"a/b/{SAVE_ID}/rank-00003.json") == SAVE_ID
    assert find_save_id(f"a/model-{SAVE_ID}-00001-of-00002.safetensors") == SAVE_ID
    assert find_save_id(f"model-{SAVE_ID}-00001-of-00002.safetensors") == SAVE_ID
    assert find_save_id("a/__0_0.distcp") == ""
    assert find_save_id("mine.txt") == ""


@given(st.integers(0, 10**12))
def test_steps_come_back(step: int) -> None:
    assert parse_step(step_prefix(step)) == step
    assert parse_step(step_prefix(step).rstrip("/")) == step


@pytest.mark.parametrize("prefix", ["step-1/", "step-000000001/", "step-x", "run/step-00000001"])
def test_other_prefixes_are_no_steps(prefix: str) -> None:
    assert parse_step(prefix) is None


def test_no_negative_step() -> None:
    with pytest.raises(ValueError, match="-1"):
        step_prefix(-1)


def test_bytes_of_all_objects() -> None:
    assert COMMIT.num_bytes == 70_000

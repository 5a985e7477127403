"""Metadata is read without running its pickle, also if it is damaged or hostile."""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aioflux import CheckpointCorruptError
from aioflux.checkpoint._load.decode_metadata import decode_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

URI = "gs://bucket/run/step-00000001/.metadata"


def metadata(
    *, size: tuple[int, ...] = (4, 6), offsets: tuple[int, ...] = (0, 0), key: str = "__0_0.distcp"
) -> Metadata:
    properties = TensorProperties(torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(size))
    tensor = TensorStorageMetadata(properties, torch.Size((4, 6)), [chunk])
    return Metadata(
        state_dict_metadata={"model.w": tensor, "step": BytesStorageMetadata()},
        planner_data={"model.w": ("model", "w"), "step": ("step",), "l.0": ("l", 0)},
        storage_data={
            MetadataIndex("model.w", chunk.offsets, 0): _StorageInfo(key, 0, 700),
            MetadataIndex("step"): _StorageInfo(key, 700, 80, ["stream.zstd/1"]),
        },
        storage_meta=StorageMeta("gs://bucket/run", "a-save", None, ["model"]),
        version="1.0.0",
    )


class Calls:
    """Reduces to a call, as a pickle that attacks does."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.reduced = (what, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def refuse(data: bytes) -> str:
    with pytest.raises(CheckpointCorruptError, match="has no valid metadata") as caught:
        decode_metadata(data, uri=URI)
    assert URI in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_reads_as_pickle_reads_it(protocol: int) -> None:
    data = pickle.dumps(metadata(), protocol=protocol)
    assert decode_metadata(data, uri=URI) == pickle.loads(data) == metadata()


def test_metadata_that_stock_wrote_reads_and_its_directory_is_text(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(3, dtype=torch.float8_e5m2),
        "n": {"b": torch.ones(()), "c": [torch.ones(2, 3, dtype=torch.complex64), {"d": 1}]},
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    read, stock = decode_metadata(data, uri=URI), pickle.loads(data)
    assert read.storage_meta is not None
    assert read.storage_meta.checkpoint_id == str(tmp_path)
    read.storage_meta.checkpoint_id = tmp_path
    assert read == stock


def test_metadata_of_torch_before_2_3_reads() -> None:
    data = pickle.dumps(metadata(), protocol=2)
    old = data.replace(
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n",
    ).replace(
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
        b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n",
    )
    assert old.count(b"_shard") == 2
    assert decode_metadata(old, uri=URI) == metadata()


def test_fields_that_older_metadata_lacks_have_their_defaults() -> None:
    old = metadata()
    del old.__dict__["storage_meta"], old.__dict__["version"]
    read = decode_metadata(pickle.dumps(old), uri=URI)
    assert (read.storage_meta, read.version) == (None, None)


def test_bytes_after_the_pickle_are_ignored() -> None:
    data = pickle.dumps(metadata())
    assert decode_metadata(data + b"\0aioflux-commit\0{}", uri=URI) == metadata()


ATTACKS = {
    "os.system": (os.system, "touch {}"),
    "eval": (eval, "open('{}', 'w')"),
    "exec": (exec, "open('{}', 'w')"),
    "open": (open, "{}", "w"),
    "getattr": (getattr, os, "system"),
    "import": (__import__, "os"),
    "torch.load": (torch.load, "{}"),
    "torch.hub": (torch.hub.load, "{}", "x"),
    "torch._utils": (torch._utils._rebuild_tensor_v2, None, 0, (1,), (1,), False, None),
    "torch.save": (torch.save, 1, "{}"),
    "extension": (copyreg.add_extension, "os", "system", 1),
    "path": (Path.touch, Path("{}")),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_of_anything_else_is_refused_and_not_run(
    attack: tuple[Any, ...], protocol: int, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    what, *arguments = attack
    filled = [each.format(mark) if isinstance(each, str) else each for each in arguments]
    filled = [mark if isinstance(each, Path) else each for each in filled]
    if what is getattr:  # a module cannot be pickled; its name does
        filled = ["os", "system"]
    hostile = metadata()
    hostile.planner_data = Calls(what, *filled)
    message = refuse(pickle.dumps(hostile, protocol=protocol))
    assert "no code was run" in message
    assert not mark.exists()


def opcodes(*pieces: bytes) -> bytes:
    return b"\x80\x04" + b"".join(pieces) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


HERE = "torch.distributed.checkpoint.metadata"
HOSTILE = {
    "dotted name": opcodes(named(HERE, "os.system"), text("true"), b"\x85R"),
    "name of a name": opcodes(named(HERE, "Metadata.__init__.__globals__"), b"."),
    "module's module": opcodes(named("torch.distributed.checkpoint.filesystem", "os")),
    "class as state": opcodes(named(HERE, "Metadata"), b")\x81", named(HERE, "Metadata"), b"b"),
    "fields of a class": opcodes(named(HERE, "Metadata"), b"}", text("x"), b"K\x01sb"),
    "slots of a class": opcodes(named(HERE, "Metadata"), b"N}", text("x"), b"K\x01s\x86b"),
    "fields of a constant": opcodes(named("torch", "float32"), b"}", text("x"), b"K\x01sb"),
    "call of a class": opcodes(named(HERE, "Metadata"), b"}\x85R"),
    "new with arguments": opcodes(named(HERE, "Metadata"), b"}\x85\x81"),
    "call of text": opcodes(text("eval"), text("1"), b"\x85R"),
    "size of text": opcodes(named("torch", "Size"), text("12"), b"\x85R"),
    "size of negatives": opcodes(named("torch", "Size"), b"J\xff\xff\xff\xff\x85\x85R"),
    "layout by name": opcodes(named("torch.serialization", "_get_layout"), text("os"), b"\x85R"),
    "dtype that is none": opcodes(named("torch", "load")),
    "dictionary with items": opcodes(named("collections", "OrderedDict"), b"}\x85R"),
    "unknown field": opcodes(
        named(HERE, "Metadata"), b")\x81}(", text("__class__"), b"K\x01", text("x"), b"K\x02ub"
    ),
    "filled twice": opcodes(named(HERE, "BytesStorageMetadata"), b")\x81}b}b"),
    "key without value": opcodes(b"}(K\x01u"),
    "key that nests": opcodes(b"}))\x86K\x01s"),
    "persistent id": opcodes(text("storage"), b"Q"),
    "text persistent id": b"\x80\x04P1\n.",
    "extension": b"\x80\x04\x82\x01.",
    "instance": b"\x80\x04(ios\nsystem\n.",
    "object": opcodes(b"(", named("os", "system"), text("true"), b"o"),
    "buffer": b"\x80\x05\x97.",
    "byte array of an exabyte": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b".",
    "text of an exabyte": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b".",
    "memo of an exabyte": b"\x80\x04Nr\xff\xff\xff\xff.",
    "integer as text": b"\x80\x04I" + b"9" * 100_000 + b"\n.",
    "no stop": b"\x80\x04}",
    "nothing": b"",
    "protocol of tomorrow": b"\x80\x09N.",
    "global that is a number": opcodes(b"K\x01K\x02\x93"),
    "call without arguments": opcodes(named("torch", "Size"), b"K\x01R"),
    "call with two": opcodes(named("torch", "Size"), b"))\x86R"),
    "new without arguments": opcodes(named(HERE, "Metadata"), b"K\x01\x81"),
    "properties of text": opcodes(named(HERE, "TensorProperties"), b")\x81", text("x"), b"b"),
    "something else": pickle.dumps({"a": 1}),
    "empty stack": b"\x80\x04R.",
    "no mark": b"\x80\x04Kt.",
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_pickle_that_does_anything_else_is_refused(data: bytes) -> None:
    before = dict(vars(Metadata))
    refuse(data)
    assert dict(vars(Metadata)) == before


def test_nested_tuples_cost_time_by_their_length() -> None:
    """Were it more, this would never end."""
    doubled = b"".join(b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86\x94" for at in range(200))
    data = opcodes(b"}K\x01\x94", doubled, b"K\x01s")
    refuse(data)
    refuse(opcodes(b")\x94" + b"\x85" * 300_000 + b"}h\x00K\x01s"))


def test_memory_grows_with_the_bytes_and_not_with_the_numbers_in_them() -> None:
    tracemalloc.start()
    try:
        for claim in ("memo of an exabyte", "text of an exabyte", "byte array of an exabyte"):
            refuse(HOSTILE[claim])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def changed(**fields: Any) -> Metadata:
    each = metadata()
    each.state_dict_metadata["model.w"].__dict__.update(fields)
    return each


def described(values: dict[str, Any]) -> Metadata:
    each = metadata()
    each.state_dict_metadata = values
    return each


def stored(places: dict[Any, Any]) -> Metadata:
    each = metadata()
    each.storage_data = places
    return each


def bare(kind: type) -> Any:
    return kind.__new__(kind)


CONTRADICTIONS = {
    "part outside of its tensor": metadata(offsets=(1, 0)),
    "part of other dimensions": metadata(size=(4,), offsets=(0,)),
    "object above the checkpoint": metadata(key="../other/__0_0.distcp"),
    "object within above": metadata(key="a/../../b"),
    "object at the root": metadata(key="/etc/passwd"),
    "object of Windows": metadata(key="..\\x"),
    "object without a name": metadata(key=""),
    "tensor too large": changed(size=torch.Size((2**40, 2**40))),
    "tensor of text": changed(chunks=["x"]),
    "parts that overlap": changed(
        chunks=[
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in (((0, 0), (2, 2)), ((0, 2), (2, 2)), ((1, 1), (1, 1)))
        ]
    ),
    "field of another kind": changed(size=(4, 6)),
    "value of another kind": described({"a": 1}),
    "tensor without fields": described({"a": bare(TensorStorageMetadata)}),
    "objects of another kind": stored({MetadataIndex("a"): 1}),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_metadata_that_contradicts_itself_is_refused(contradiction: Metadata) -> None:
    refuse(pickle.dumps(contradiction))


def test_an_ordered_dictionary_reads() -> None:
    each = metadata()
    each.planner_data = OrderedDict(each.planner_data)
    assert decode_metadata(pickle.dumps(each), uri=URI) == each


WHOLE = pickle.dumps(metadata())


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, len(WHOLE) - 1),
    new=st.binary(min_size=1, max_size=12),
    keep=st.integers(0, 16),
    cut=st.integers(0, len(WHOLE)),
)
@example(at=0, new=b"r\xff\xff\xff\xff", keep=0, cut=len(WHOLE))
def test_damage_is_a_typed_error_or_metadata(at: int, new: bytes, keep: int, cut: int) -> None:
    data = (WHOLE[:at] + new + WHOLE[at + keep :])[:cut]
    try:
        read: Any = decode_metadata(data, uri=URI)
    except CheckpointCorruptError as exc:
        read = exc
    assert type(read) is Metadata or len(str(read)) < 1000
    pickle.loads(pickle.dumps(read))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_a_typed_error(noise: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode_metadata(b"\x80\x04" + noise, uri=URI)

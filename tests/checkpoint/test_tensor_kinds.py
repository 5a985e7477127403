"""Tensors that are tied, parameters, and tensors that no load could read, saved in both ways."""

from __future__ import annotations

import re
import time
import uuid
import warnings
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from aioflux import CheckpointError
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._save.items import find_ties
from aioflux.checkpoint.compression import ZStandard
from aioflux.checkpoint.dcp import StorageReader, StorageWriter, load_state
from tests.checkpoint.dcp.states import DTYPES, assert_equal, no_warnings, save, state_of_all_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_BYTES = 4 * 512 * 512


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def checkpointer(uri: str) -> Iterator[Checkpointer]:
    with Checkpointer(uri) as checkpointer:
        yield checkpointer


def by_checkpointer(root: str, state: dict[str, Any], **options: Any) -> str:
    """Save by a Checkpointer, and return the uri of the checkpoint."""
    with Checkpointer(root, **options) as checkpointer:
        return checkpointer.save(1, state).uri.rstrip("/")


def by_writer(root: str, state: dict[str, Any], **options: Any) -> str:
    """Save by a StorageWriter."""
    save(state, StorageWriter(f"{root}/step-00000001", **options))
    return f"{root}/step-00000001"


saved_by = pytest.mark.parametrize(
    "saved", [by_checkpointer, by_writer], ids=["checkpointer", "writer"]
)


def tied_state() -> dict[str, Any]:
    weight = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512)
    return {
        "embedding": weight,
        "bias": torch.ones(3),
        "head": weight.detach(),  # another tensor of the same memory
        "turned": weight.t(),
        "rows": weight[:10],
        "numbers": weight.view(torch.int32),
        "inner": {"again": weight},
    }


@saved_by
@pytest.mark.parametrize("compression", [None, ZStandard()], ids=["plain", "compressed"])
def test_tied_tensors_are_stored_once_and_tied_again(
    tmp_path: Path, saved: Callable[..., str], compression: Any
) -> None:
    """Views that only overlap are stored each by itself, and are not tied by a load."""
    state = tied_state()
    uri = saved(tmp_path.as_uri(), state, compression=compression)
    loaded = load_state(uri)
    assert_equal(loaded, state)
    assert loaded["head"] is loaded["embedding"] is loaded["inner"]["again"]
    pointers = {loaded[key].data_ptr() for key in ("embedding", "turned", "rows", "numbers")}
    assert len(pointers) == 4
    into = {key: torch.zeros_like(state[key]) for key in ("embedding", "head", "turned")}
    with no_warnings():
        dcp.load(into, storage_reader=StorageReader(uri))
    assert_equal(into, {key: state[key] for key in into})
    if compression is None:
        folder = tmp_path / "step-00000001"
        stored = sum(path.stat().st_size for path in folder.rglob("*.distcp"))
        # The weight, the same turned around, as whole numbers, and ten rows.
        assert 3 * NUM_BYTES < stored < 3.2 * NUM_BYTES
        into = {key: torch.zeros_like(state[key]) for key in ("embedding", "head", "turned")}
        with no_warnings():
            dcp.load(into, storage_reader=dcp.FileSystemReader(folder))
        assert_equal(into, {key: state[key] for key in into})


def test_tensors_that_are_tied_no_more_are_stored_anew(checkpointer: Checkpointer) -> None:
    """The plan stays, and what lies where does not."""
    one, other = torch.ones(1000), torch.zeros(1000)
    for step, state in enumerate([{"a": one, "b": other}, {"a": one, "b": one}] * 2):
        checkpointer.save(step, state)
        assert_equal(checkpointer.load(step), state)
    assert checkpointer.verify(3, deep=True).is_valid


def test_tied_tensors_of_objects_apart_are_stored_once(uri: str) -> None:
    weight = torch.randn(100, 100)
    state = {"a": weight, "b": torch.randn(300), "c": weight, "d": torch.randn(200)}
    save(state, StorageWriter(uri, objects_per_rank=4))
    loaded = load_state(uri)
    assert_equal(loaded, state)
    assert loaded["a"] is loaded["c"]


def test_many_views_that_begin_together_are_distinguished_quickly() -> None:
    """Each is looked up, and not compared with all others: in 0.05 s, where that takes 60."""
    base = torch.zeros(10_000)
    views = [base[: number + 1] for number in range(10_000)]
    started = time.process_time()
    assert find_ties([*views, base.view(100, 100), base[:5]]) == {10_001: 4}
    assert time.process_time() - started < 20


def test_a_tied_model_is_tied_after_a_load(checkpointer: Checkpointer) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 8)
            self.head = torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    checkpointer.save(1, {"parameters": dict(model.named_parameters(remove_duplicate=False))})
    loaded = checkpointer.load()["parameters"]
    assert isinstance(loaded["head.weight"], torch.nn.Parameter)
    assert loaded["head.weight"] is loaded["embedding.weight"]
    other = Model()
    checkpointer.save(2, {"model": model.state_dict()})
    checkpointer.load(into={"model": other})
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight


def test_parameters_and_dictionaries_come_back_as_what_they_were(
    checkpointer: Checkpointer,
) -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    state = OrderedDict(
        learned=torch.nn.Parameter(torch.ones(2)),
        inner={"frozen": frozen, "list": [torch.nn.Parameter(torch.zeros(1)), torch.ones(1)]},
        numbers=torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        counted=Counter({3: 1}),
        plain={"tensor": torch.ones(1), "nothing": OrderedDict()},
    )
    checkpointer.save(1, state)
    for loaded in (checkpointer.load(), checkpointer.load(into={})):
        assert_equal(loaded["learned"], state["learned"])
        assert type(loaded["counted"]) is Counter
        assert type(loaded["inner"]) is dict
        assert type(loaded["plain"]["nothing"]) is OrderedDict
        kinds = [loaded["learned"], loaded["inner"]["frozen"], loaded["inner"]["list"][0]]
        assert [type(each) for each in kinds] == [torch.nn.Parameter] * 3
        assert [each.requires_grad for each in kinds] == [True, False, True]
        assert type(loaded["numbers"]) is torch.nn.Parameter
        assert type(loaded["plain"]["tensor"]) is type(loaded["inner"]["list"][1]) is torch.Tensor
    assert type(checkpointer.load()) is OrderedDict
    frozen.requires_grad_(True)  # a change that the plan must not hide
    checkpointer.save(2, state)
    assert checkpointer.load()["inner"]["frozen"].requires_grad
    checkpointer.save(3, {**state, "learned": torch.ones(2), "counted": {3: 1}})
    loaded = checkpointer.load()
    assert (type(loaded), type(loaded["learned"]), type(loaded["counted"])) == (
        dict,
        torch.Tensor,
        dict,
    )


def test_dictionaries_come_back_in_their_order_if_some_are_empty(
    checkpointer: Checkpointer,
) -> None:
    state = OrderedDict(
        first={},
        number=1,
        deep={"inner": {"none": {}}, 3: {}, "value": 2},
        list=[{}, torch.ones(1), {"b": {}, "a": 1}],
        counts={2: {}, 1: torch.ones(1)},
        last={},
        end=2,
    )
    checkpointer.save(1, state)
    for loaded in (checkpointer.load(), checkpointer.load(into={})):
        assert str(dict(loaded)) == str(dict(state))


@saved_by
def test_tensors_of_all_kinds_come_back(uri: str, saved: Callable[..., str]) -> None:
    state = state_of_all_kinds(3)
    assert_equal(load_state(saved(uri, state)), state)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


class Marked(torch.Tensor):
    """A tensor of a class that loads do not know."""


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (quantized, "'model.odd' is quantized"),
    "coo": (
        lambda: torch.eye(3).to_sparse(),
        r"'model.odd' is a tensor of layout torch.sparse_coo",
    ),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "'model.odd' is a tensor of layout"),
    "meta": (lambda: torch.empty(3, device="meta"), "'model.odd'.*meta"),
    "subclass": (lambda: torch.ones(3).as_subclass(Marked), "'model.odd' is a Marked"),
}


@saved_by
@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_that_cannot_be_loaded_is_refused_at_the_save(
    uri: str, saved: Callable[..., str], make: Callable[[], torch.Tensor], says: str
) -> None:
    state = {"model": {"a": torch.ones(2), "odd": make()}}
    with pytest.raises((CheckpointException, Exception), match=says):
        saved(uri, state)
    with Checkpointer(uri) as checkpointer:
        assert checkpointer.steps() == []


EXOTIC = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if type(dtype) is torch.dtype and re.search(r"bits\d|int[1-7]$", str(dtype))
}


@pytest.mark.parametrize("dtype", EXOTIC.values(), ids=EXOTIC)
def test_a_dtype_that_cannot_be_saved_is_named_with_what_to_do(
    checkpointer: Checkpointer, dtype: torch.dtype
) -> None:
    odd = torch.arange(8, dtype=torch.uint8).view(dtype)
    with pytest.raises(CheckpointError, match=rf"'model\.odd' is of {dtype}, .*\.view\({dtype}\)"):
        checkpointer.save(1, {"model": {"odd": odd}})
    checkpointer.save(1, {"model": {"odd": odd.view(torch.uint8)}})
    loaded = checkpointer.load()["model"]["odd"].view(dtype)
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), odd.view(torch.uint8))


def test_a_nested_tensor_is_named(checkpointer: Checkpointer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(CheckpointError, match=r"'model\.odd' is a nested tensor"):
        checkpointer.save(1, {"model": {"odd": nested}})


def test_an_expanded_tensor_is_not_loaded_into(checkpointer: Checkpointer) -> None:
    result = checkpointer.save(1, {"model": {"w": torch.arange(6).view(2, 3)}})
    into = {"model": {"w": torch.zeros(2, 1, dtype=torch.int64).expand(2, 3)}}
    says = r"'model\.w' of .* is loaded into an expanded tensor of \(2, 3\).*\.contiguous\(\)"
    with pytest.raises(CheckpointError, match=says):
        checkpointer.load(into=into)
    with pytest.raises(CheckpointException, match=says), no_warnings():
        dcp.load(into, storage_reader=StorageReader(result.uri))


@saved_by
def test_a_subclass_that_loads_know_is_saved(uri: str, saved: Callable[..., str]) -> None:
    with torch.serialization.safe_globals([Marked]):
        state = {"odd": torch.arange(3.0).as_subclass(Marked)}
        loaded = load_state(saved(uri, state))
    assert torch.equal(loaded["odd"], torch.arange(3.0))


CASTS = [
    pytest.param(stored, target, id=f"{stored}-{target}".replace("torch.", ""))
    for stored, target in [
        (torch.float32, torch.int8),
        (torch.float32, torch.bool),
        (torch.complex64, torch.float32),
        (torch.int64, torch.int8),
        (torch.int8, torch.uint8),
        (torch.uint64, torch.int64),
        (torch.int64, torch.bool),
    ]
]


@pytest.mark.parametrize(("stored", "target"), CASTS)
def test_values_that_a_target_cannot_hold_are_not_loaded_into_it(
    checkpointer: Checkpointer, stored: torch.dtype, target: torch.dtype
) -> None:
    result = checkpointer.save(1, {"model": {"w": torch.ones(5, dtype=stored)}})
    says = f"'model.w' of {result.uri.rstrip('/')} is {stored}, and is loaded into .*{target}"
    into = {"model": {"w": torch.zeros(5, dtype=target)}}
    with pytest.raises(CheckpointError, match=says):
        checkpointer.load(into=into)
    with pytest.raises(CheckpointException, match=says), no_warnings():
        dcp.load(into, storage_reader=StorageReader(result.uri))
    assert not into["model"]["w"].any()


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.int8, torch.int64),
        (torch.uint8, torch.int16),
        (torch.int64, torch.float32),
        (torch.bool, torch.int8),
        (torch.float32, torch.complex64),
        *((dtype, dtype) for dtype in DTYPES),
    ],
    ids=str,
)
def test_values_are_loaded_into_other_types_of_their_kind(
    checkpointer: Checkpointer, stored: torch.dtype, target: torch.dtype
) -> None:
    checkpointer.save(1, {"w": torch.ones(5).to(stored)})
    into = {"w": torch.zeros(5).to(target)}
    checkpointer.load(into=into)
    assert_equal(into, {"w": torch.ones(5).to(stored).to(target)})

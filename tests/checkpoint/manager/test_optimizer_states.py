"""Every state of an optimizer or scheduler comes back equal: by load(), by load(into=), by DCP."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler

from aioflux import CheckpointError
from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.checkpoint.dcp import StorageReader
from tests.checkpoint.dcp.states import no_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def checkpointer() -> Iterator[Checkpointer]:
    with Checkpointer(f"memory://{uuid.uuid4().hex}/run") as checkpointer:
        yield checkpointer


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Fail unless both are equal in structure, types of containers and keys, and values."""
    assert type(left) is type(right), f"{where}: {type(left)} is not {type(right)}"
    if isinstance(left, dict):
        assert sorted(map(repr, left)) == sorted(map(repr, right)), where
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for at, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{at}]")
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert torch.equal(left, right), where
    else:
        assert left == right, where


class IntegerSteps(torch.optim.Optimizer):
    """Keeps a Python int for the step, None for what is not used, and tuples, some nested.

    It has no classes of torch.optim in its state, like optimizers of other libraries.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "scale": (1e-30, 1e-3), "beta1": None, "more": {}})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state.update(step=0, rms=0, unused=None, empty={}, none=[], row=None)
                state["step"] += 1
                state["rms"] = float(each.detach().square().mean())
                state["row"] = torch.full((3,), float(state["step"]))
                state["nested"] = (state["step"], (None, [state["step"]]), {"a": state["step"]})
                state["history"] = [torch.full((2,), float(n)) for n in range(state["step"])]
                state["table"] = {n: {"hits": n * state["step"]} for n in range(state["step"])}
                with torch.no_grad():
                    each.sub_(group["lr"] * 0.1)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIMIZERS["IntegerSteps"] = IntegerSteps
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 3}}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, OPTIONS.get(name, {})) for name in sorted(OPTIMIZERS)),
    ("SGD", {}),
    ("Adam", {"amsgrad": True, "lr": torch.tensor(0.01)}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("LBFGS", {"max_iter": 4, "line_search_fn": "strong_wolfe", "history_size": 3}),
]


def build(name: str, options: dict[str, Any]) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return an optimizer of two groups where it takes them, and what makes a step with it."""
    torch.manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    groups: Any = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.02}]
    if name == "LBFGS":
        groups = weights
    optimizer: Any = OPTIMIZERS[name](groups, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((weight**2).sum() + weight.sin().sum() for weight in weights)
        loss.backward()
        if name == "SparseAdam":
            for weight in weights:
                weight.grad = weight.grad.to_sparse(1)
        return loss

    def step() -> None:
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    return optimizer, step


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("IntegerSteps", {}),
    ("LBFGS", {"max_iter": 3}),
    ("SGD", {}),
]
"""States of different forms: of tensors, of plain values, with lists of tensors, and empty."""


@pytest.mark.parametrize(
    ("name", "options", "before", "after"),
    [
        *((name, options, 2, 3) for name, options in VARIANTS),
        *((name, options, *steps) for name, options in FORMS for steps in ((5, 0), (0, 2))),
    ],
    ids=str,
)
def test_states_of_optimizers_come_back_equal(
    checkpointer: Checkpointer, name: str, options: dict[str, Any], before: int, after: int
) -> None:
    """Saved at one step, loaded into the state of a later step and of a new optimizer."""
    optimizer, step = build(name, options)
    for _ in range(before):
        step()
    saved = copy.deepcopy(optimizer.state_dict())
    checkpointer.save(1, {"optimizer": optimizer.state_dict()})
    for _ in range(after):
        step()

    assert_same(checkpointer.load(), {"optimizer": saved})
    changed = {"optimizer": copy.deepcopy(optimizer.state_dict())}
    assert checkpointer.load(into=changed) is changed
    assert_same(changed, {"optimizer": saved})
    fresh, _ = build(name, options)
    assert_same(checkpointer.load(into={"optimizer": fresh.state_dict()}), {"optimizer": saved})
    for live in (build(name, options)[0], optimizer):
        checkpointer.load(into={"optimizer": live})
        assert_same(live.state_dict(), saved)


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_a_training_state_brings_back_every_optimizer(
    checkpointer: Checkpointer, name: str, options: dict[str, Any]
) -> None:
    optimizer, step = build(name, options)
    for _ in range(3):
        step()
    saved = copy.deepcopy(optimizer.state_dict())
    checkpointer.save(1, TrainingState(optimizer=optimizer))
    step()
    for live in (optimizer, build(name, options)[0]):
        checkpointer.load(into=TrainingState(optimizer=live))
        assert_same(live.state_dict(), saved)


def as_text(state: Any) -> Any:
    """Return a state as stock DCP can name it: with text for its keys."""
    if isinstance(state, dict):
        return {str(key): as_text(value) for key, value in state.items()}
    return [*map(as_text, state)] if isinstance(state, list) else state


def cleared(state: Any) -> Any:
    """Return a state of the same structure with nothing in it."""
    if isinstance(state, dict):
        return {key: cleared(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(each, torch.Tensor | dict) for each in state):
        return [*map(cleared, state)]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else "nothing"


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_stock_dcp_loads_states_of_optimizers(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """With text for the keys of both: its planner knows no others."""
    optimizer, step = build(name, options)
    for _ in range(3):
        step()
    state = {"optimizer": optimizer.state_dict()}
    with Checkpointer(tmp_path.as_uri()) as checkpointer:
        checkpointer.save(1, state)
    for reader in (
        dcp.FileSystemReader(tmp_path / "step-00000001"),
        StorageReader(f"{tmp_path.as_uri()}/step-00000001"),
    ):
        into = cleared(as_text(state))
        with no_warnings():
            dcp.load(into, storage_reader=reader)
        assert_same(into, as_text(state))


@pytest.mark.parametrize("name", ["LBFGS", "IntegerSteps", "Adam"])
def test_states_that_stock_dcp_saved_come_back_below_numbers(tmp_path: Path, name: str) -> None:
    """It stores text for keys; the numbers are those of the state that is loaded into."""
    optimizer, step = build(name, {})
    for _ in range(3):
        step()
    saved = copy.deepcopy(optimizer.state_dict())
    with no_warnings():
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "step-00000001")
    step()
    into = {"optimizer": optimizer.state_dict()}
    with Checkpointer(tmp_path.as_uri()) as checkpointer:
        checkpointer.load(1, into=into)
    for state in (into["optimizer"]["state"], saved["state"]):
        for each in state.values():  # an empty dictionary has no name in what DCP writes
            each.pop("empty", None)
            each.pop("table", None)
    assert_same(into["optimizer"]["state"], saved["state"])


class Doubled:
    """A callable with a state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, epoch: int) -> float:
        self.factor += 1
        return self.factor / (epoch + 1)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [Doubled(), lambda n: 0.9**n]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [Doubled(), Doubled()]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [3, 4])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def test_no_scheduler_is_left_out() -> None:
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type)
        and issubclass(kind, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    }
    assert known - {"LRScheduler", "SWALR"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("before", "after"), [(4, 3), (0, 5)], ids=str)
def test_states_of_schedulers_come_back_equal(
    checkpointer: Checkpointer, name: str, before: int, after: int
) -> None:
    def build_one() -> Any:
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups: Any = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.05}]
        return SCHEDULERS[name](torch.optim.SGD(groups, lr=0.1, momentum=0.9))

    def step(scheduler: Any, times: int) -> None:
        for _ in range(times):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an order that does not matter here
                scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))

    scheduler = build_one()
    step(scheduler, before)
    saved = copy.deepcopy(scheduler.state_dict())
    checkpointer.save(1, {"scheduler": scheduler.state_dict()})
    step(scheduler, after)

    assert_same(checkpointer.load(), {"scheduler": saved})
    for live in (scheduler, build_one()):
        into = {"scheduler": copy.deepcopy(live.state_dict())}
        checkpointer.load(into=into)
        assert_same(into, {"scheduler": saved})
        checkpointer.load(into={"scheduler": live})
        assert_same(live.state_dict(), saved)


KEYS = [
    pytest.param({1: {"a": 5, "b": None}}, {1: {"a": 1, "b": 2}}, id="values below a number"),
    pytest.param({"1": 5}, {"1": 1}, id="text that looks like a number"),
    pytest.param({-1: 5, 10**40: 6}, {-1: 0, 10**40: 0}, id="large and negative"),
    pytest.param({1: {"1": {1: 5}}}, {1: {"1": {1: 0}}}, id="both below each other"),
    pytest.param({1: 5, "b": 6, None: 7}, {1: 0, "b": 0, None: 0}, id="keys of several types"),
    pytest.param({(1, "a"): {True: 5}}, {(1, "a"): {True: 0}}, id="tuples and bools"),
    pytest.param({1: [torch.ones(2), 3]}, {1: [torch.zeros(2), 0]}, id="tensors in a list"),
    pytest.param({1: [torch.ones(2)]}, {1: [torch.zeros(2)] * 3}, id="a shorter list"),
    pytest.param({1: [torch.ones(2)] * 3}, {1: [torch.zeros(2)]}, id="a longer list"),
    pytest.param({1: [torch.ones(2)] * 3}, {1: []}, id="a list for an empty one"),
    pytest.param({1: []}, {1: [torch.ones(2)]}, id="an empty list"),
    pytest.param({1: {}}, {1: {"a": 1, "t": torch.ones(2)}}, id="an empty dictionary"),
    pytest.param({1: {"a": 1, 2: torch.ones(2)}}, {1: {}}, id="into an empty dictionary"),
    pytest.param({1: None}, {1: torch.ones(2)}, id="None for a tensor"),
    pytest.param({1: torch.ones(2)}, {1: None}, id="a tensor for None"),
    pytest.param({1: torch.ones(2)}, {1: {"a": 1}}, id="a tensor for a dictionary"),
    pytest.param({1: {"a": 1}}, {1: torch.ones(2)}, id="a dictionary for a tensor"),
    pytest.param({1: (1, (2, [3, {}]))}, {1: (0, 0)}, id="tuples"),
    pytest.param({1: {2: (torch.ones(1), None)}}, {1: {2: ()}}, id="a tensor in a tuple"),
    pytest.param({1: 5}, {1: 0, 2: 9}, id="a number that was not saved"),
    pytest.param({1: 5, 2: 9}, {1: 0}, id="a number that is not stored"),
    pytest.param([{"lr": 1}, {"lr": 2, 3: 4}], [{"lr": 9, "old": 1}], id="a list of dictionaries"),
    pytest.param([[], [{}], None], [[1], [2], 3], id="empty in lists"),
    pytest.param(
        {"o": OrderedDict(b=1, a=2), "c": Counter({3: 2, "x": 1}), "e": OrderedDict()},
        {"o": OrderedDict(b=0, a=0), "c": Counter({3: 1, "x": 0}), "e": OrderedDict()},
        id="kinds of dictionaries",
    ),
]


@pytest.mark.parametrize(("saved", "into"), KEYS)
def test_values_below_keys_of_every_type_come_back(
    checkpointer: Checkpointer, saved: Any, into: Any
) -> None:
    checkpointer.save(1, {"x": saved})
    assert_same(checkpointer.load(), {"x": saved})
    target = {"x": copy.deepcopy(into)}
    checkpointer.load(into=target)
    assert_same(target, {"x": saved})
    assert_same(checkpointer.load(into={"x": {}}), {"x": saved})
    assert_same(checkpointer.load(into={}), {"x": saved})


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"x": {1: 2, "1": 3}}, "'x' has keys that are the same as text"),
        ({"x": {0: {"a": 1}, "0": 2}}, "'x' has keys that are the same as text"),
        ({"x.a": 1, "x": {"a": 2}}, "duplicated flatten key x"),
    ],
    ids=["number", "number of a dictionary", "dot"],
)
def test_keys_that_are_the_same_name_are_refused(
    checkpointer: Checkpointer, state: Any, problem: str
) -> None:
    """Of two values with one name only one could be stored."""
    with pytest.raises(CheckpointError, match=problem):
        checkpointer.save(1, state)
    assert checkpointer.steps() == []


def test_text_keys_choose_what_is_loaded(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "step": 5})
    into: dict[str, Any] = {"model": {"a": torch.zeros(2)}}
    there = into["model"]["a"]
    checkpointer.load(into=into)
    assert_same(into, {"model": {"a": torch.ones(2)}})
    assert into["model"]["a"] is there


@pytest.mark.parametrize(
    ("into", "says"),
    [
        ({"model": {"a": torch.zeros(2), "c": 1}}, "'model.c' is not stored"),
        (
            {"model": {"a": torch.zeros(3)}},
            r"'model.a' is stored with size \(2,\), and has size \(3,\) in this",
        ),
        (
            {"model": {"a": {"x": 1}}},
            "'model.a' is stored as a tensor, and is a dict in this state",
        ),
        ({"model": torch.zeros(2)}, "'model' is stored as a dict, and is a Tensor in this state"),
    ],
    ids=["missing", "size", "tensor", "dict"],
)
def test_a_state_that_does_not_fit_is_reported_with_the_checkpoint(
    checkpointer: Checkpointer, into: Any, says: str
) -> None:
    checkpointer.save(3, {"model": {"a": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=f"step-00000003 cannot be loaded .*{says}"):
        checkpointer.load(into=into)


def test_tensors_that_share_memory_here_and_not_there_get_their_own(
    checkpointer: Checkpointer,
) -> None:
    """Two groups of a new optimizer have one tensor for their rates, and two were saved."""

    def rates(*values: float) -> torch.optim.Optimizer:
        groups: Any = [{"params": torch.nn.Parameter(torch.ones(1))} for _ in range(2)]
        for group, value in zip(groups, values, strict=False):
            group["lr"] = torch.tensor(value)
        return torch.optim.Adam(groups, lr=torch.tensor(0.5), foreach=False)

    saved = rates(0.1, 0.2).state_dict()
    checkpointer.save(1, {"optimizer": saved})
    into = {"optimizer": rates().state_dict()}
    checkpointer.load(into=into)
    assert_same(into["optimizer"], saved)
    live = rates()
    checkpointer.load(into={"optimizer": live})
    assert_same(live.state_dict(), saved)

"""A run that was stopped and loaded goes on bit by bit as one that never stopped."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import aioflux
from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.data import IterableDataset
from tests.checkpoint.manager.worker_process import STUBBORN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.clouds("gs", "s3", "az")

NUM_SAMPLES = 40
WIDTH = 6


def numbers_of(sample: Any) -> torch.Tensor:
    return torch.tensor(list(sample.data), dtype=torch.float32) / 100


class Run:
    """A small training with everything that draws or counts."""

    def __init__(self, root: str, kind: str = "adam") -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        weights = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = {
            "adam": lambda: torch.optim.AdamW(weights, lr=0.01),
            "sgd": lambda: torch.optim.SGD(weights, lr=0.01),
            "momentum": lambda: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
        }[kind]()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=9)
        self.dataset = IterableDataset(f"{root}/train", transform=numbers_of, shuffle=True, seed=5)
        self.state = TrainingState(
            self.model, self.optimizer, scheduler=self.scheduler, dataset=self.dataset
        )
        self.seen: list[list[float]] = []
        self._samples: Iterator[Any] = iter(())

    def train(self, num_steps: int, *, epoch: int = 0) -> None:
        for _ in range(num_steps):
            batch = torch.stack([self._next(epoch) for _ in range(4)])
            noise = random.random() + np.random.random()
            loss = ((self.model(batch) - batch.sum(1, keepdim=True)) ** 2).mean() * (1 + noise)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.seen.append([*batch[:, 0].tolist(), loss.item()])

    def _next(self, epoch: int) -> Any:
        for sample in self._samples:
            return sample
        self.dataset.set_epoch(epoch)
        self._samples = iter(self.dataset)
        return next(self._samples)

    def weights(self) -> list[torch.Tensor]:
        state = list(self.optimizer.state.values())
        moments = [t for each in state for t in each.values() if isinstance(t, torch.Tensor)]
        return [*self.model.state_dict().values(), *moments]


@pytest.fixture
def samples(server: GCSServer) -> str:
    draw = np.random.default_rng(0)
    with aioflux.sync.open_store(f"{server.root}/train") as store:
        pairs = ((f"{n:03d}", draw.bytes(WIDTH)) for n in range(NUM_SAMPLES))
        store.put_many(pairs)
    return server.root


@pytest.mark.clouds("gs", "s3")
@pytest.mark.parametrize("kind", ["adam", "sgd", "momentum"])
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(samples: str, kind: str) -> None:
    unbroken = Run(samples, kind)
    unbroken.train(8)

    first = Run(samples, kind)
    first.train(4)
    first.state.values = {"epoch": 0}
    with Checkpointer(f"{samples}/run") as checkpointer:
        handle = checkpointer.save_async(4, first.state)
        first.train(2)  # what was staged is not what is trained on
        handle.result()
    second = Run(samples, kind)
    torch.rand(3), random.random(), np.random.random()  # and other generators than at the start
    with Checkpointer(f"{samples}/run") as checkpointer:
        assert checkpointer.load(into=second.state) is second.state
        assert checkpointer.loaded_step == 4
    second.train(4)

    assert second.state.values == {"epoch": 0}
    assert second.seen == unbroken.seen[4:]
    assert len(second.weights()) == len(unbroken.weights())
    assert all(map(torch.equal, second.weights(), unbroken.weights()))
    assert second.scheduler.get_last_lr() == unbroken.scheduler.get_last_lr()


@pytest.mark.clouds("gs")
def test_requests_that_are_sent_again_draw_none_of_the_numbers(server: GCSServer) -> None:
    """A run that met a busy service goes on as one that did not."""
    server.faults.add("*insert*", status=503, times=3)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[2]
    with Checkpointer(f"{server.root}/run", retry=STUBBORN) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2)})
        assert checkpointer.history()[-1].num_retries >= 3
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[2] == before[2]


def test_a_save_before_the_first_step_changes_nothing(samples: str) -> None:
    """DCP's helpers for optimizers take a step to make their state."""
    with Checkpointer(f"{samples}/run") as checkpointer:
        saved, other = Run(samples), Run(samples)
        checkpointer.save(0, saved.state)
        assert not saved.optimizer.state
        checkpointer.load(into=other.state)
    assert not other.optimizer.state
    other = Run(samples)
    other.train(3)
    saved = Run(samples)
    saved.state.state_dict()
    saved.train(3)
    assert saved.seen == other.seen


def test_several_optimizers_and_other_things_with_a_state(server: GCSServer) -> None:
    def made() -> tuple[TrainingState, list[Any]]:
        model = nn.Linear(3, 2)
        optimizers = [torch.optim.Adam([each], lr=0.1) for each in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        state = TrainingState(model, optimizers, rng=False, scaler=scaler)
        return state, [model, *optimizers, scaler]

    state, (model, *optimizers, scaler) = made()
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    with Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, state)
        other, (model_2, *optimizers_2, scaler_2) = made()
        checkpointer.load(into=other)
    assert torch.equal(model.weight, model_2.weight)
    for mine, theirs in zip(optimizers, optimizers_2, strict=True):
        (one,), (two,) = mine.state.values(), theirs.state.values()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert scaler_2.state_dict() == scaler.state_dict()


def test_weights_are_loaded_where_they_are(server: GCSServer) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    address = other.weight.data_ptr()
    with Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, TrainingState(model))
        checkpointer.load(into=TrainingState(other))
    assert torch.equal(model.weight, other.weight)
    assert other.weight.data_ptr() == address


def test_a_model_on_the_meta_device_gets_memory(server: GCSServer) -> None:
    model = nn.Linear(3, 2)
    with torch.device("meta"):
        other = nn.Linear(3, 2)
    with Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, TrainingState(model))
        checkpointer.load(into=TrainingState(other))
    assert torch.equal(model.weight, other.weight)


def test_another_number_of_ranks_needs_a_way_to_merge(server: GCSServer) -> None:
    class Counted:
        def __init__(self, count: int) -> None:
            self.count = count

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    def as_of_two(state: TrainingState) -> dict[str, Any]:
        told = state.state_dict()
        for name in ("dataset", "rng"):
            told[name]["rank-00001"] = told[name]["rank-00000"]
        return told

    with Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, as_of_two(TrainingState(dataset=Counted(3))))
        with pytest.raises(ValueError, match="merge_states"):
            checkpointer.load(into=TrainingState(dataset=Counted(0), rng=False))
        counted = Counted(0)
        merged = TrainingState(
            dataset=counted, merge=lambda states: {"count": sum(s["count"] for s in states)}
        )
        with pytest.warns(RuntimeWarning, match="random generators of 2 ranks"):
            checkpointer.load(into=merged)
    assert counted.count == 6
    with pytest.raises(ValueError, match="'values' is a name that"):
        TrainingState(values=counted)


def test_an_optimizer_whose_state_holds_lists(server: GCSServer) -> None:
    """Those of LBFGS come back as lists, and its next step is the same."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(3, 4)) - torch.arange(3.0)[:, None]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    model, optimizer = build()
    train(model, optimizer)
    with Checkpointer(f"{server.root}/lbfgs") as checkpointer:
        checkpointer.save(1, TrainingState(model, optimizer))
        other_model, other = build()
        checkpointer.load(into=TrainingState(other_model, other))
    train(model, optimizer)
    train(other_model, other)
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)

"""TrainingState: the complete state of a training run, to resume it as if it had never stopped.

    model, optimizers, schedulers      the same on all ranks, or sharded across them
    dataset, random generators         one for each rank: `dataset.rank-00003`, `rng.rank-00003`

Small values without a fixed structure are saved in a tuple, which DCP stores as one value. The
state of optimizers is taken as it is: DCP's helpers would take a step first.
"""

from __future__ import annotations

import random
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    Contents = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]

__all__ = ["TrainingState"]

_RANK: Final = "rank-{:05d}"
_FORM: Final = "dataset-form"
"""Prefix of the form of the dataset's states, as a name: a load knows it before it reads any. No
keyword of `TrainingState` can be the same."""
_PLAIN: Final = "dataset"
"""The form of the state of a dataset that is in no loader."""


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState:
    """The state of a training run: `save_async(step, state)`, `load(into=state)`.

    Loaded into objects that were built alike, training continues bit by bit as it would have
    without a break, if its kernels are deterministic.

    Attributes:
        values: Other values to save, such as `{"epoch": 3}`: numbers, strings, lists, dictionaries.
            A load replaces it.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        scheduler: Any = (),
        dataset: Any = None,
        rng: bool = True,
        merge: Callable[[list[Any]], Any] | None = None,
        **others: _Stateful,
    ) -> None:
        """Takes references and copies nothing.

        Args:
            model: The model; the wrappers DistributedDataParallel and torch.compile are removed.
            optimizer: One optimizer, or several.
            scheduler: One learning rate scheduler, or several.
            dataset: An object whose `state_dict` is this rank's progress: a dataset of
                `aioflux.data`, or torchdata's `StatefulDataLoader` over one, as
                `aioflux.data.loader(..., resumable=True)` returns it.
            rng: Save the generators of random, numpy, torch and all CUDA devices, too; those of
                this process. A transform that draws numbers in a DataLoader's workers draws other
                ones after a load.
            merge: Merges the states that all ranks had of `dataset`, for a load with another number
                of ranks or of a loader's workers: `aioflux.data.merge_states`. The rest of the
                epoch is then shared again, and each sample is still read once. The merged state
                is loaded into the loader's sampler or dataset, the first that has
                `load_state_dict`.
            others: Other objects with `state_dict` and `load_state_dict`, of the same structure at
                the load: a GradScaler, averaged weights.
        """
        self.values: dict[str, Any] = {}
        self._model = _unwrapped(model) if model is not None else None
        self._optimizers = _several(optimizer)
        self._schedulers = _several(scheduler)
        self._dataset = dataset
        self._has_rng = rng
        self._merge = merge
        self._merging_from: str | None = None
        """The form of the states that a load merges."""
        if taken := others.keys() & {"model", "optimizer", "scheduler", "dataset", "rng", "values"}:
            raise ValueError(f"{min(taken)!r} is taken; give it another name")
        self._others = others

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are those of the training, not copies."""
        mine = _RANK.format(_rank())
        state: dict[str, Any] = {name: each.state_dict() for name, each in self._others.items()}
        if self._model is not None:
            state["model"] = self._model.state_dict()
        for name, optimizer in _named("optimizer", self._optimizers):
            saved_state = optimizer.state_dict()
            state[name] = {
                "state": {
                    str(number): {key: _packed(value) for key, value in each.items()}
                    for number, each in saved_state["state"].items()
                },
                "param_groups": (saved_state["param_groups"],),
            }
        for name, scheduler in _named("scheduler", self._schedulers):
            state[name] = (scheduler.state_dict(),)
        if self._dataset is not None:
            state["dataset"] = {mine: (self._dataset.state_dict(),)}
            form = _form(self._dataset)
            state[_FORM] = {form: (form,)}
        if self._has_rng:
            state["rng"] = {mine: (_rng_state(),)}
        state["values"] = (self.values,)
        return state

    def template_for(self, contents: Contents) -> dict[str, Any]:
        """Return the state to load into: tensors that exist are filled in place, others are made.

        Args:
            contents: The contents of the checkpoint, by names flattened with dots.
        """
        template: dict[str, Any] = {name: each.state_dict() for name, each in self._others.items()}
        if self._model is not None:
            template["model"] = {
                name: _with_memory(each) for name, each in self._model.state_dict().items()
            }
        for name, optimizer in _named("optimizer", self._optimizers):
            template[name] = {
                "state": _optimizer_template(optimizer, f"{name}.state.", contents),
                "param_groups": None,
            }
        for name, _ in _named("scheduler", self._schedulers):
            template[name] = None
        if self._dataset is not None:
            template["dataset"] = self._datasets(contents)
        if self._has_rng and (generators := self._generators(contents)):
            template["rng"] = generators
        template["values"] = None
        return template

    def _datasets(self, contents: Contents) -> dict[str, Any]:
        """Return the states that this rank reads: its own, or all if their number changed."""
        saved, form = _parts("dataset", contents), _form(self._dataset)
        mine = _RANK.format(_rank())
        # Checkpoints of earlier versions do not name the form.
        (saved_form,) = _parts(_FORM, contents) or [form]
        is_same = len(saved) == _world_size() and mine in saved and saved_form == form
        self._merging_from = None if is_same else saved_form
        if is_same:
            return {mine: None}
        if self._merge is None:
            raise ValueError(
                f"the checkpoint holds the dataset of {len(saved)} ranks ({saved_form}), and there "
                f"are {_world_size()} ({form}): build TrainingState(dataset=..., "
                "merge=aioflux.data.merge_states), which distributes the rest of the epoch again"
            )
        return dict.fromkeys(saved)

    def _generators(self, contents: Contents) -> dict[str, Any]:
        """Return the random generators that this rank reads: its own, if the ranks are as many."""
        saved = _parts("rng", contents)
        mine = _RANK.format(_rank())
        if len(saved) == _world_size() and mine in saved:
            return {mine: None}
        warnings.warn(
            f"the checkpoint holds random generators of {len(saved)} ranks, and there are "
            f"{_world_size()}: they are not loaded",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply a state that was loaded into a template."""
        for name, each in self._others.items():
            each.load_state_dict(state[name])
        if self._model is not None:
            _load_model(self._model, state["model"])
        for name, optimizer in _named("optimizer", self._optimizers):
            (groups,) = state[name]["param_groups"]
            saved_state = {
                int(number): {key: _unpacked(value) for key, value in each.items()}
                for number, each in state[name]["state"].items()
            }
            optimizer.load_state_dict({"state": saved_state, "param_groups": groups})
        for name, scheduler in _named("scheduler", self._schedulers):
            (saved_state,) = state[name]
            scheduler.load_state_dict(saved_state)
        if self._dataset is not None:
            states = [each for (each,) in state["dataset"].values()]
            if self._merging_from is None or self._merge is None:
                self._dataset.load_state_dict(states[0])
            else:
                merged = self._merge(states)
                is_whole = self._merging_from != _PLAIN and merged.keys() == states[0].keys()
                _load_merged(self._dataset, merged, is_whole=is_whole)
        if self._has_rng:
            for (each,) in state.get("rng", {}).values():
                _set_rng_state(each)
        (self.values,) = state["values"]


def _form(dataset: Any) -> str:
    """Return the form of a dataset's state: a loader's depends on its number of workers."""
    if isinstance(dataset, DataLoader):
        return f"loader with {dataset.num_workers} workers"
    return _PLAIN


def _parts(name: str, contents: Contents) -> list[str]:
    """Return the names right below `name` in a checkpoint."""
    return [each.partition(".")[2] for each in contents if each.startswith(f"{name}.")]


def _load_merged(dataset: Any, merged: Any, *, is_whole: bool) -> None:
    """Load a merged state into a dataset, or into the part of a loader that it belongs to.

    Args:
        dataset: A dataset or a loader.
        merged: The state.
        is_whole: It has the form of a loader's own state.
    """
    if is_whole or not isinstance(dataset, DataLoader):
        dataset.load_state_dict(merged)
        return
    parts: list[Any] = [
        dataset.sampler,
        getattr(dataset.batch_sampler, "sampler", None),
        dataset.dataset,
    ]
    stateful = [each for each in parts if hasattr(each, "load_state_dict")]
    if not stateful:
        raise TypeError(
            f"neither the sampler nor the dataset of {dataset!r} has load_state_dict, which takes "
            "the merged state; use a dataset of aioflux.data, of a MapDataset with ObjectSampler"
        )
    # An iterator of the loader would continue with the old state; this ends it in torchdata.
    dataset.load_state_dict({})  # type: ignore[attr-defined]
    stateful[0].load_state_dict(merged)


def _packed(value: Any) -> Any:
    """Return a value that DCP saves as one; LBFGS has lists of tensors, for example."""
    is_one = isinstance(value, torch.Tensor | str | int | float) or value is None
    return value if is_one else (value,)


def _unpacked(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _named(name: str, each: list[Any]) -> list[tuple[str, Any]]:
    """Return several objects with the names under which they are saved."""
    if len(each) == 1:
        return [(name, each[0])]
    return [(f"{name}-{number}", one) for number, one in enumerate(each)]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    return _unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def _with_memory(value: Any) -> Any:
    """Return a tensor that can be loaded into: memory for one on the meta device."""
    if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, DTensor):
        return torch.empty_like(value, device="cpu")
    return value


def _load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the weights, unless they were filled in place."""
    there = model.state_dict()
    if any(not _is_same(there[name], each) for name, each in state.items()):
        is_meta = any(isinstance(each, torch.Tensor) and each.is_meta for each in there.values())
        model.load_state_dict(state, assign=is_meta)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two tensors are the same memory."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        first, second = first.to_local(), second.to_local()
    return not first.is_meta and first.data_ptr() == second.data_ptr()


def _optimizer_template(
    optimizer: torch.optim.Optimizer, prefix: str, contents: Contents
) -> dict[str, dict[str, Any]]:
    """Return tensors for the state of an optimizer; a new one has none."""
    there = optimizer.state_dict()["state"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    template: dict[str, dict[str, Any]] = {}
    for name, stored in contents.items():
        if not name.startswith(prefix):
            continue
        number, _, key = name.removeprefix(prefix).partition(".")
        known = there.get(int(number), {}).get(key)
        template.setdefault(number, {})[key] = _tensor_for(stored, known, parameters[int(number)])
    return template


def _tensor_for(stored: Any, known: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    size, dtype = stored.size, stored.properties.dtype
    if isinstance(known, torch.Tensor) and (known.shape, known.dtype) == (size, dtype):
        return known
    if parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # A step counter stays on the CPU; the optimizer moves other tensors itself.
    device = parameter.device if len(size) else "cpu"
    return torch.empty(size, dtype=dtype, device=device)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rng_state() -> dict[str, Any]:
    """Return the random generators of this process as plain values."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tobytes(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

"""TrainingState: the complete state of a training run, to resume it exactly.

    model, optimizers, schedulers      the same on all ranks, or sharded across the ranks
    dataset, random generators         one for each rank: `dataset.rank-00003`, `rng.rank-00003`

Small values without a fixed structure are saved in a tuple, because DCP stores a tuple as one
value. The states of optimizers come from `state_dict`. DCP's helper functions are not used, because
they run an optimizer step on an optimizer without a state.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    Contents = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]

_RANK: Final = "rank-{:05d}"
_FORM: Final = "dataset-form"
"""Key of a dictionary with one entry, whose name is the form of the dataset's states: `_PLAIN`, or
a loader with its number of workers. The form is a name, because a load knows names from the
metadata before it reads values. Because of the hyphen, no keyword of `TrainingState` is the same as
this key."""
_PLAIN: Final = "dataset"
"""Form of the state of a dataset without a loader."""


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState:
    """The state of a training run: `save_async(step, state)`, `load(into=state)`.

    The resumed training computes the same bits as training without a break, if the objects were
    built with the same arguments, the kernels are deterministic, and the world size and the number
    of workers did not change. For random transforms in workers see `rng`.

    Attributes:
        values: Other values to save, such as `{"epoch": 3}`: numbers, strings, lists, dictionaries.
            A load replaces the dictionary.
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
        """Keep references to the objects; nothing is copied.

        Args:
            model: The model. DistributedDataParallel and torch.compile wrappers are removed, so
                that names in the checkpoint do not depend on them.
            optimizer: One optimizer, or several.
            scheduler: One learning rate scheduler, or several.
            dataset: An object whose `state_dict` is the progress of this rank: a dataset of
                `aioflux.data`, or a `StatefulDataLoader` from
                `aioflux.data.loader(..., resumable=True)`, or a loader with `num_threads`.
            rng: Save the random generators of this process, too: those of random, numpy, torch and
                all CUDA devices. Generators in the workers of a DataLoader are not saved: random
                transforms there draw different numbers after a load.
            merge: Function that merges the `dataset` states of all ranks, for a load with a
                different number of ranks or of a loader's workers: `aioflux.data.merge_states`.
                The ranks then share the rest of the epoch again. Each sample is still read once,
                apart from the few objects that `tail` repeats or leaves out. If `dataset` is a
                loader and the merged state is not the state of a loader, it is loaded into the
                loader's sampler if the sampler has `load_state_dict`, otherwise into its dataset.
            others: Other objects with `state_dict` and `load_state_dict`, such as a GradScaler or
                averaged weights. Their structure must be the same at the load.
        """
        self.values: dict[str, Any] = {}
        self._model = _unwrap(model) if model is not None else None
        self._optimizers = _as_list(optimizer)
        self._schedulers = _as_list(scheduler)
        self._dataset = dataset
        self._has_rng = rng
        self._merge = merge
        self._merging_from: str | None = None
        """Form of the saved states if the next load merges them; None otherwise."""
        if used := others.keys() & {"model", "optimizer", "scheduler", "dataset", "rng", "values"}:
            raise ValueError(
                f"{min(used)!r} is a name that TrainingState uses itself; choose another keyword"
            )
        self._others = others

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with references to the tensors of the training, not copies."""
        rank_name = _RANK.format(_rank())
        state: dict[str, Any] = {name: other.state_dict() for name, other in self._others.items()}
        if self._model is not None:
            state["model"] = self._model.state_dict()
        for name, optimizer in _named("optimizer", self._optimizers):
            saved_state = optimizer.state_dict()
            state[name] = {
                "state": {
                    str(number): {key: _pack(value) for key, value in parameter_state.items()}
                    for number, parameter_state in saved_state["state"].items()
                },
                "param_groups": (saved_state["param_groups"],),
            }
        for name, scheduler in _named("scheduler", self._schedulers):
            state[name] = (scheduler.state_dict(),)
        if self._dataset is not None:
            state["dataset"] = {rank_name: (self._dataset.state_dict(),)}
            form = _form(self._dataset)
            state[_FORM] = {form: (form,)}
        if self._has_rng:
            state["rng"] = {rank_name: (_rng_state(),)}
        state["values"] = (self.values,)
        return state

    def template_for(self, contents: Contents) -> dict[str, Any]:
        """Return the state to load into: tensors of the training, or new tensors if there are none.

        Args:
            contents: Metadata of the checkpoint's items, by names flattened with dots.
        """
        template: dict[str, Any] = {
            name: other.state_dict() for name, other in self._others.items()
        }
        if self._model is not None:
            template["model"] = {
                name: _with_memory(value) for name, value in self._model.state_dict().items()
            }
        for name, optimizer in _named("optimizer", self._optimizers):
            template[name] = {
                "state": _optimizer_template(optimizer, f"{name}.state.", contents),
                "param_groups": None,
            }
        for name, _ in _named("scheduler", self._schedulers):
            template[name] = None
        if self._dataset is not None:
            template["dataset"] = self._dataset_template(contents)
        if self._has_rng and (generators := self._rng_template(contents)):
            template["rng"] = generators
        template["values"] = None
        return template

    def _dataset_template(self, contents: Contents) -> dict[str, Any]:
        """Return a template with this rank's dataset state, or all states if a load merges them."""
        saved, form = _names_below("dataset", contents), _form(self._dataset)
        rank_name = _RANK.format(_rank())
        # Checkpoints of earlier versions do not name the form.
        (saved_form,) = _names_below(_FORM, contents) or [form]
        is_same = len(saved) == _world_size() and rank_name in saved and saved_form == form
        self._merging_from = None if is_same else saved_form
        if is_same:
            return {rank_name: None}
        if self._merge is None:
            raise ValueError(
                f"the checkpoint has the dataset states of {len(saved)} ranks ({saved_form}), but "
                f"this run has {_world_size()} ranks ({form}): build TrainingState(dataset=..., "
                "merge=aioflux.data.merge_states), which distributes the rest of the epoch again"
            )
        return dict.fromkeys(saved)

    def _rng_template(self, contents: Contents) -> dict[str, Any]:
        """Return a template with this rank's generators; empty if the world size has changed."""
        saved = _names_below("rng", contents)
        rank_name = _RANK.format(_rank())
        if len(saved) == _world_size() and rank_name in saved:
            return {rank_name: None}
        warnings.warn(
            f"the checkpoint has random generators of {len(saved)} ranks, but this run has "
            f"{_world_size()} ranks: the generators are not loaded",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply a state that was loaded into a template."""
        for name, other in self._others.items():
            other.load_state_dict(state[name])
        if self._model is not None:
            _load_model(self._model, state["model"])
        for name, optimizer in _named("optimizer", self._optimizers):
            (groups,) = state[name]["param_groups"]
            saved_state = {
                int(number): {key: _unpack(value) for key, value in parameter_state.items()}
                for number, parameter_state in state[name]["state"].items()
            }
            optimizer.load_state_dict({"state": saved_state, "param_groups": groups})
        for name, scheduler in _named("scheduler", self._schedulers):
            (saved_state,) = state[name]
            scheduler.load_state_dict(saved_state)
        if self._dataset is not None:
            states = [saved_state for (saved_state,) in state["dataset"].values()]
            if self._merging_from is None or self._merge is None:
                self._dataset.load_state_dict(states[0])
            else:
                merged = self._merge(states)
                is_of_loader = self._merging_from != _PLAIN and merged.keys() == states[0].keys()
                _load_merged(self._dataset, merged, is_of_loader=is_of_loader)
        if self._has_rng:
            for (generators,) in state.get("rng", {}).values():
                _set_rng_state(generators)
        (self.values,) = state["values"]


def _form(dataset: Any) -> str:
    """Return the form of a dataset's state; for a loader it includes the number of workers."""
    if isinstance(dataset, DataLoader):
        return f"loader with {dataset.num_workers} workers"
    return _PLAIN


def _names_below(name: str, contents: Contents) -> list[str]:
    """Return the names in a checkpoint that are below `name`, without that prefix."""
    return [key.partition(".")[2] for key in contents if key.startswith(f"{name}.")]


def _load_merged(dataset: Any, merged: Any, *, is_of_loader: bool) -> None:
    """Load a merged state into a dataset, a loader, or a loader's sampler or dataset."""
    if is_of_loader or not isinstance(dataset, DataLoader):
        dataset.load_state_dict(merged)
        return
    parts: list[Any] = [
        dataset.sampler,
        getattr(dataset.batch_sampler, "sampler", None),
        dataset.dataset,
    ]
    stateful = [part for part in parts if hasattr(part, "load_state_dict")]
    if not stateful:
        raise TypeError(
            f"cannot load the merged state into {dataset!r}: neither its sampler nor its dataset "
            "has load_state_dict; use an IterableDataset of aioflux.data, or a MapDataset with "
            "ObjectSampler"
        )
    # An iterator of the loader would continue with the old state. An empty state makes torchdata
    # drop the iterator.
    dataset.load_state_dict({})  # type: ignore[attr-defined]
    stateful[0].load_state_dict(merged)


def _pack(value: Any) -> Any:
    """Put a container, such as LBFGS's lists of tensors, into a tuple, which DCP saves whole."""
    is_single = isinstance(value, torch.Tensor | str | int | float) or value is None
    return value if is_single else (value,)


def _unpack(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _as_list(objects: Any) -> list[Any]:
    return list(objects) if isinstance(objects, list | tuple) else [objects]


def _named(name: str, objects: list[Any]) -> list[tuple[str, Any]]:
    """Return each object with its name in the checkpoint; names of several objects have numbers."""
    if len(objects) == 1:
        return [(name, objects[0])]
    return [(f"{name}-{number}", item) for number, item in enumerate(objects)]


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    return _unwrap(inner) if isinstance(inner, torch.nn.Module) else model


def _with_memory(value: Any) -> Any:
    """Return the value; for a tensor on the meta device, a new tensor in main memory."""
    if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, DTensor):
        return torch.empty_like(value, device="cpu")
    return value


def _load_model(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the weights, unless the load filled the tensors of the model in place."""
    current = model.state_dict()
    if any(not _shares_memory(current[name], value) for name, value in state.items()):
        is_meta = any(isinstance(v, torch.Tensor) and v.is_meta for v in current.values())
        model.load_state_dict(state, assign=is_meta)


def _shares_memory(first: Any, second: Any) -> bool:
    """Return whether two tensors begin at the same address."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        first, second = first.to_local(), second.to_local()
    return not first.is_meta and first.data_ptr() == second.data_ptr()


def _optimizer_template(
    optimizer: torch.optim.Optimizer, prefix: str, contents: Contents
) -> dict[str, dict[str, Any]]:
    """Return tensors to load an optimizer's state into. A new optimizer has no such tensors yet."""
    current = optimizer.state_dict()["state"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    template: dict[str, dict[str, Any]] = {}
    for name, stored in contents.items():
        if not name.startswith(prefix):
            continue
        number, _, key = name.removeprefix(prefix).partition(".")
        tensor = current.get(int(number), {}).get(key)
        template.setdefault(number, {})[key] = _tensor_for(stored, tensor, parameters[int(number)])
    return template


def _tensor_for(stored: Any, current: Any, parameter: torch.Tensor) -> Any:
    """Return the current tensor if it fits the stored one, or a new one; None for other values."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    size, dtype = stored.size, stored.properties.dtype
    if isinstance(current, torch.Tensor) and (current.shape, current.dtype) == (size, dtype):
        return current
    if parameter.shape == size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Scalars, such as step counters, are on the CPU; the optimizer moves them where needed.
    device = parameter.device if len(size) else "cpu"
    return torch.empty(size, dtype=dtype, device=device)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rng_state() -> dict[str, Any]:
    """Return the states of the random generators of this process as plain values."""
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

"""load_state: a whole state from a distributed checkpoint, without a template and alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from aioflux import _bridge
from aioflux.checkpoint._load.decode import as_bytes, default_registry, load_value
from aioflux.checkpoint._load.fetch import WantedValue, fetch
from aioflux.checkpoint._load.source import Shape, Source, decode_source, read_commit_object
from aioflux.checkpoint._load.units import Wanted, narrow
from aioflux.checkpoint._save.nesting import CONTAINERS, nest, parameter_names
from aioflux.checkpoint._store.commits import uri_below
from aioflux.checkpoint._store.objects import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Unpack

    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.metadata import Metadata

    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["as_parameter", "load_state", "read_state", "stored_place"]


def load_state(
    uri: str,
    *,
    map_location: str | torch.device | None = None,
    weights_only: bool = True,
    verify: bool = True,
    extension_registry: ExtensionRegistry | None = None,
    **options: Unpack[StoreOptions],
) -> dict[Any, Any]:
    """Load all of a distributed checkpoint, nested as it was saved, whoever saved it.

    It needs neither a state to load into nor a process group: sharded tensors come whole.
    Tied tensors, of which the bytes are stored once, are one tensor again. What a `Checkpointer`
    saved has the keys, parameters, ordered dictionaries and counters that it had; in other
    checkpoints, dictionaries have text for keys where numbers were.

    Args:
        uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
        map_location: Device of the tensors; the CPU by default.
        weights_only: Refuse values whose pickles hold more than tensors and plain values; without
            it, unpickling them executes what they say.
        verify: Compare what is read with the checksums of the commit, where there is one.
        extension_registry: Transforms that items of stock DCP may have; its own and ours by
            default.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointCorruptError: It is damaged, or holds what it must not; nothing was executed.
        CheckpointError: A value is not loaded because of `weights_only`.
        StorageError: It could not be read.
    """
    store = open_checkpoint(uri, **options)
    _bridge.close_when_dropped(store)
    try:
        source = decode_source(store, _bridge.run(read_commit_object(store)))
        return read_state(
            store,
            source,
            map_location=map_location,
            weights_only=weights_only,
            verify=verify,
            registry=extension_registry,
        )
    finally:
        _bridge.run(store.aclose())


def read_state(
    store: Store,
    source: Source,
    *,
    map_location: str | torch.device | None = None,
    weights_only: bool = True,
    verify: bool = True,
    registry: ExtensionRegistry | None = None,
) -> dict[Any, Any]:
    """Load all of a checkpoint whose commit object was read; see `load_state`."""
    values: dict[str, Any] = {}
    tensors: dict[Any, torch.Tensor] = {}
    wants: list[Wanted | WantedValue] = []
    device = torch.device("cpu" if map_location is None else map_location)
    for name, each in source.metadata.state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata):
            _check(source, name, each)
            known = tensors.get(place := stored_place(source.metadata, name))
            if known is not None:  # tied: two names for the same bytes
                values[name] = known
                continue
            values[name] = torch.empty(each.size, dtype=each.properties.dtype, device=device)
            tensors[place] = values[name]
            wants.extend(_parts(source, name, each, values[name]))
        else:
            values[name] = None  # keeps the order
            stored = source.find(MetadataIndex(name))
            uri = uri_below(store, stored.key)
            wants.append(WantedValue(name, stored, _taker(values, name, uri, device, weights_only)))
    with torch.no_grad():
        fetch(
            store,
            source,
            wants,
            registry=registry or default_registry(),
            done=lambda _: None,
            is_verified=verify,
        )
    ways = source.metadata.planner_data
    containers = source.commit.extra.get(CONTAINERS, "") if source.commit else ""
    try:
        _make_parameters(values, source.metadata, parameter_names(containers))
        return nest(values, ways if isinstance(ways, dict) else None, containers)
    except ValueError as exc:
        raise source.corrupt(f"its values do not nest: {exc}") from exc


def stored_place(metadata: Metadata, name: str) -> Any:
    """Return what stored tensors have in common that are the same bytes, and no others."""
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    storage = metadata.storage_data or {}
    places = []
    for part in tensor.chunks:
        info = storage.get(MetadataIndex(name, part.offsets))
        if info is None:
            return name
        places.append((part.offsets, part.sizes, info.relative_path, info.offset, info.length))
    return (tensor.size, tensor.properties.dtype, *places) if places else name


def _make_parameters(values: dict[str, Any], metadata: Metadata, names: set[str]) -> None:
    """Make parameters of the tensors that were some; those that are tied stay so."""
    made: dict[int, torch.nn.Parameter] = {}
    for name in names & values.keys():
        value, stored = values[name], metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            if id(value) not in made:
                made[id(value)] = as_parameter(value, stored)
            values[name] = made[id(value)]


def as_parameter(tensor: torch.Tensor, stored: TensorStorageMetadata) -> torch.nn.Parameter:
    """Return a tensor as the parameter that was saved."""
    can_learn = tensor.is_floating_point() or tensor.is_complex()
    return torch.nn.Parameter(tensor, requires_grad=can_learn and stored.properties.requires_grad)


def _check(source: Source, name: str, tensor: TensorStorageMetadata) -> None:
    """Raise CheckpointCorruptError before memory is taken for what is not stored."""
    parts = {(tuple(each.offsets), tuple(each.sizes)): each for each in tensor.chunks}
    if sum(math.prod(sizes) for _, sizes in parts) < math.prod(tensor.size):
        raise source.corrupt(f"parts of {name!r} are missing")
    for offsets, sizes in parts:
        stored = source.find(MetadataIndex(name, offsets))
        shape = Shape(sizes, tensor.properties.dtype)
        held = stored.item.data_size if stored.item and stored.item.data_start else stored.length
        if shape.num_bytes > held and not (stored.descriptors and stored.item is None):
            raise source.corrupt(f"{name!r} is larger than what is stored of it")


def _parts(
    source: Source, name: str, tensor: TensorStorageMetadata, whole: torch.Tensor
) -> Iterator[Wanted]:
    for part in tensor.chunks:
        index = MetadataIndex(name, part.offsets)
        shape = Shape(tuple(part.sizes), tensor.properties.dtype)
        target = narrow(whole, part.offsets, part.sizes)
        yield Wanted(name, source.find(index), shape, (0,) * len(part.sizes), target)


def _taker(
    values: dict[str, Any], name: str, uri: str, device: torch.device, weights_only: bool
) -> Callable[[torch.Tensor], None]:
    def take(data: torch.Tensor) -> None:
        values[name] = load_value(
            as_bytes(data), name, uri, map_location=device, weights_only=weights_only
        )

    return take

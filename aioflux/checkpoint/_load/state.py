"""load_state: the whole state of a distributed checkpoint, loaded into one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from aioflux import _bridge
from aioflux.checkpoint._format.nesting import CONTAINERS, nest, parameter_names
from aioflux.checkpoint._load.fetch import fetch
from aioflux.checkpoint._load.stored_checkpoint import (
    CommitBytes,
    StoredCheckpoint,
    StoredShape,
    decode_checkpoint,
    read_commit_object,
)
from aioflux.checkpoint._load.targets import (
    TensorTarget,
    ValueTarget,
    as_bytes,
    default_registry,
    load_value,
    narrow,
)
from aioflux.checkpoint._store.steps import Replacements, uri_below
from aioflux.errors import CheckpointCorruptError
from aioflux.store import open_store

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.metadata import Metadata

    from aioflux.options import StoreOptions
    from aioflux.store import Store


def load_state(
    uri: str,
    *,
    map_location: str | torch.device | None = None,
    weights_only: bool = True,
    verify: bool = True,
    extension_registry: ExtensionRegistry | None = None,
    **options: Unpack[StoreOptions],
) -> dict[Any, Any]:
    """Load a whole distributed checkpoint, of aioflux or of stock DCP, nested as it was saved.

    The call needs no state to load into and no process group. Sharded tensors are loaded whole.
    Tied tensors, whose bytes are stored once, are one tensor again. From a checkpoint of
    `Checkpointer`, keys, parameters, ordered dictionaries and counters have their saved types. In
    other checkpoints, integer keys of dictionaries were saved as strings. If another save replaces
    the checkpoint during the load, the new one is loaded.

    Args:
        uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
        map_location: Device of the tensors; the CPU by default.
        weights_only: Reject pickles that contain anything but tensors and plain values. False runs
            any code in the pickles.
        verify: Compare the bytes with the checksums of the commit, if the checkpoint has a commit.
        extension_registry: Extensions that undo the transforms of items of stock DCP; by default
            torch's own and `aioflux.checkpoint.compression`.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the uri.
        CheckpointCorruptError: The checkpoint is damaged, or the pickle of its metadata contains
            objects that are not metadata. No code in this pickle was run.
        CheckpointError: `weights_only` rejects a value, or `extension_registry` lacks a transform.
        StorageError: The checkpoint could not be read.
    """
    store = open_store(uri, **options)
    _bridge.close_when_dropped(store)
    try:
        return load_below(
            store,
            map_location=map_location,
            weights_only=weights_only,
            verify=verify,
            extension_registry=extension_registry,
        )
    finally:
        _bridge.run(store.aclose())


def load_below(
    store: Store,
    prefix: str = "",
    *,
    known: CommitBytes | None = None,
    map_location: str | torch.device | None = None,
    weights_only: bool = True,
    verify: bool = True,
    extension_registry: ExtensionRegistry | None = None,
) -> dict[Any, Any]:
    """Load the checkpoint below a prefix of a store.

    `known` is its commit object, if the caller has read it. For the other arguments and the errors
    see `load_state`.
    """
    replacements = Replacements(store, prefix)
    device = torch.device("cpu" if map_location is None else map_location)
    registry = extension_registry or default_registry()
    read = known
    while True:
        read = read or _bridge.run(read_commit_object(store, prefix=prefix))
        try:
            checkpoint = decode_checkpoint(store, read, prefix=prefix)
            return _read(
                store, checkpoint, device, registry, weights_only=weights_only, verify=verify
            )
        except CheckpointCorruptError:
            if not _bridge.run(replacements.has_newer(read.data)):
                raise
            read = None


def _read(
    store: Store,
    checkpoint: StoredCheckpoint,
    device: torch.device,
    registry: ExtensionRegistry,
    *,
    weights_only: bool,
    verify: bool,
) -> dict[Any, Any]:
    values: dict[str, Any] = {}
    tensors: dict[Any, torch.Tensor] = {}
    targets: list[TensorTarget | ValueTarget] = []

    def load(data: torch.Tensor, name: str, uri: str) -> None:
        values[name] = load_value(
            as_bytes(data), name, uri, map_location=device, weights_only=weights_only
        )

    for name, stored in checkpoint.metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            _check_size(checkpoint, name, stored)
            tied = tensors.get(identity := storage_identity(checkpoint.metadata, name))
            if tied is not None:
                values[name] = tied
                continue
            values[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            tensors[identity] = values[name]
            targets.extend(_targets(checkpoint, name, stored, values[name]))
        else:
            values[name] = None  # reserves its place in the order; `load` sets the value
            item = checkpoint.locate(MetadataIndex(name))
            uri = uri_below(store, checkpoint.prefix + item.key)
            targets.append(ValueTarget(name, item, partial(load, name=name, uri=uri)))
    with torch.no_grad():
        fetch(
            store,
            checkpoint,
            targets,
            registry=registry,
            on_loaded=lambda _: None,
            is_verified=verify,
        )
    paths = checkpoint.metadata.planner_data
    containers = checkpoint.commit.extra.get(CONTAINERS, "") if checkpoint.commit else ""
    try:
        _make_parameters(values, checkpoint.metadata, parameter_names(containers))
        return nest(values, paths if isinstance(paths, dict) else None, containers)
    except ValueError as exc:
        raise checkpoint.corrupt_error(f"its values cannot be nested: {exc}") from exc


def storage_identity(metadata: Metadata, name: str) -> Any:
    """Return a value that is equal for two tensors only if they are tied (stored once)."""
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    storage = metadata.storage_data or {}
    locations = []
    for part in tensor.chunks:
        info = storage.get(MetadataIndex(name, part.offsets))
        if info is None:
            return name
        locations.append((part.offsets, part.sizes, info.relative_path, info.offset, info.length))
    return (tensor.size, tensor.properties.dtype, *locations) if locations else name


def _make_parameters(values: dict[str, Any], metadata: Metadata, names: set[str]) -> None:
    """Replace tensors that were saved as parameters by parameters. Tied tensors stay tied."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for name in names & values.keys():
        value, stored = values[name], metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            if id(value) not in parameters:
                parameters[id(value)] = as_parameter(value, stored)
            values[name] = parameters[id(value)]


def as_parameter(tensor: torch.Tensor, stored: TensorStorageMetadata) -> torch.nn.Parameter:
    """Return a tensor as a parameter with the saved `requires_grad`, if its dtype allows it."""
    can_learn = tensor.is_floating_point() or tensor.is_complex()
    return torch.nn.Parameter(tensor, requires_grad=can_learn and stored.properties.requires_grad)


def _check_size(checkpoint: StoredCheckpoint, name: str, tensor: TensorStorageMetadata) -> None:
    """Raise CheckpointCorruptError if the tensor is larger than its stored bytes."""
    for part in tensor.chunks:
        stored = checkpoint.locate(MetadataIndex(name, part.offsets))
        shape = StoredShape(tuple(part.sizes), tensor.properties.dtype)
        size = stored.item.data_size if stored.item and stored.item.data_start else stored.length
        if shape.num_bytes > size and not (stored.descriptors and stored.item is None):
            raise checkpoint.corrupt_error(f"{name!r} is larger than its stored bytes")


def _targets(
    checkpoint: StoredCheckpoint, name: str, tensor: TensorStorageMetadata, whole: torch.Tensor
) -> Iterator[TensorTarget]:
    for part in tensor.chunks:
        index = MetadataIndex(name, part.offsets)
        shape = StoredShape(tuple(part.sizes), tensor.properties.dtype)
        target = narrow(whole, part.offsets, part.sizes)
        yield TensorTarget(name, checkpoint.locate(index), shape, (0,) * len(part.sizes), target)

"""Listings of a job: one rank lists objects, and the other ranks receive the listing.

Ranks run no collective. They use the key-value store of torch.distributed, one round of keys for
each dataset:

    first rank     add 1 to `arrived` -> 1; list; wait until all ranks have arrived; close the
                   round; set the parts, then the head
    other ranks    add 1 to `arrived` -> above 1; wait for the head; get the parts
    last rank      delete the keys

A listing is shared by all ranks or by none: if only some ranks build a dataset, the round is closed
after a time, and each of them lists. So no rank receives a listing of minutes ago. A listing that
the store, one process, could not send in ten seconds is written to an object, if the caller has
given a uri for it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pickle
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch.distributed as dist
from torch.utils.data import get_worker_info

from aioflux import _bridge, sync
from aioflux._values.uri import parse_uri
from aioflux.errors import StorageError, TransientError
from aioflux.store import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from aioflux._values.listing import KeyColumn, Listing
    from aioflux.options import StoreOptions

    _ListObjects: TypeAlias = Callable[[StoreOptions], "Listings"]

Listings: TypeAlias = "list[tuple[str, Listing | KeyColumn]]"
"""The objects of a dataset: the uri of each store, and its objects."""

_log = logging.getLogger("aioflux")

_PART_BYTES: Final = 4 * 1024 * 1024
"""Size of a part in the store. `TCPStore` rejects values above 8 MiB."""
_STORE_BYTES: Final = 8 * 10**9
"""Bytes that the store sends in ten seconds: 0.9 GB/s with four clients on two cores."""
_WAIT_SECONDS: Final = 10.0
"""Time for which ranks wait for other ranks, which need not build the dataset."""
_CLOSED: Final = 1 << 40
"""Added to `arrived` when a round is closed, so that no other rank joins it."""


class Sharing(NamedTuple):
    """Settings of a dataset; `place` is the value of its argument `share_listing`."""

    place: bool | str
    is_same_on_all_ranks: bool
    """Whether all ranks must build this dataset: they divide its objects among themselves."""
    max_store_bytes: int = _STORE_BYTES
    """Bytes that the store may send to all ranks together."""


class _Head(NamedTuple):
    """The number of parts, the uri of an object, or an error; without these, each rank lists."""

    rank: int
    uris: str
    num_parts: int = 0
    place: str = ""
    error: Exception | None = None


def fits_store(num_bytes: int, world_size: int, max_store_bytes: int = _STORE_BYTES) -> bool:
    """Return whether the store sends a compressed listing, 22 MB for a million objects."""
    return num_bytes * (world_size - 1) <= max_store_bytes


def poll_seconds(num_polls: int, world_size: int) -> float:
    """Return the pause before the next check of the store, which answers 20,000 per second."""
    return min(0.005 * 2.0 ** min(num_polls, 20), max(0.1, world_size / 5000))


def listed_once(
    uris: Sequence[str], options: StoreOptions, sharing: Sharing, list_objects: _ListObjects
) -> Listings:
    """Return `list_objects(options)`, which one rank of the job calls for all ranks.

    The options of this call have no `max_requests_per_second`, because all ranks wait for it.

    Environment:
        TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT, GROUP_WORLD_SIZE: As torchrun sets
            them.

    Raises:
        TransientError: The rank that lists did not finish in time.
        TypeError, ValueError: `sharing.place` is neither a bool nor a uri.
        ValueError: The other ranks build another dataset at this point.
    """
    if not isinstance(sharing.place, bool):
        try:
            parse_uri(sharing.place)
        except (TypeError, ValueError) as exc:
            raise type(exc)(f"share_listing must be True, False or a uri: {exc}") from None
    store = _store_of_group() if sharing.place else None
    if store is None:
        return list_objects(options)
    return _Rendezvous(store, uris, options, sharing).listings(list_objects)


def _store_of_group() -> Any:
    """Return the key-value store of the default process group; None if each rank must list."""
    if not (dist.is_available() and dist.is_initialized()) or get_worker_info() is not None:
        return None
    # A forked child has the connection of its parent, which it must not use.
    is_inherited = dist.group.WORLD in _inherited
    if is_inherited or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public name


_inherited: list[Any] = []
"""The process group of the parent of this forked process."""


def _remember_inherited_group() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [dist.group.WORLD]


_bridge.calls_in_children.append(_remember_inherited_group)


def _restart_of_group(environment: Mapping[str, str]) -> str:
    """Return the number of the restart if the agent of torchrun keeps the store over restarts.

    See pytorch/pytorch issue 135712. Agents of several nodes count different numbers: only the
    agent whose process failed counts. Their ranks would use different keys.
    """
    keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_one_agent = environment.get("GROUP_WORLD_SIZE") == "1"
    return environment.get("TORCHELASTIC_RESTART_COUNT", "") if keeps_store and is_one_agent else ""


class _Rendezvous:
    """One round: the exchange of the listing of one dataset among the ranks that build it."""

    def __init__(
        self, store: Any, uris: Sequence[str], options: StoreOptions, sharing: Sharing
    ) -> None:
        self._store, self._options, self._sharing = store, options, sharing
        endpoint_url = options.get("endpoint_url")
        self._uris = ", ".join(uris) + (f" at {endpoint_url}" if endpoint_url else "")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._name = ""
        is_needed = sharing.is_same_on_all_ranks
        kind = "all" if is_needed else hashlib.sha256(repr(self._uris).encode()).hexdigest()
        self._rounds = f"aioflux/{_restart_of_group(os.environ)}/{self._world_size}/{kind}"
        self._timeout_seconds: float = store.timeout.total_seconds()
        self._wait_seconds = min(self._timeout_seconds, math.inf if is_needed else _WAIT_SECONDS)

    def listings(self, list_objects: _ListObjects) -> Listings:
        """List, or receive the listing of the rank that came first."""
        try:
            number, num_arrived = self._store.add(f"{self._rounds}/num_closed", 0) - 1, _CLOSED + 1
            while num_arrived > _CLOSED:
                number += 1
                self._name = f"{self._rounds}/{number}"
                num_arrived = self._store.add(f"{self._name}/arrived", 1)
            listings = self._list(list_objects) if num_arrived == 1 else self._receive()
        except dist.DistError as exc:
            raise self._error(
                "the store of the process group, in rank 0 or torchrun, ended"
            ) from exc
        return list_objects(self._options) if listings is None else listings

    def _error(self, problem: str) -> TransientError:
        message = (
            f"rank {self._rank} of {self._world_size} has no listing of {self._uris}: {problem}; "
            "see the logs of all ranks. With share_listing=False each rank lists"
        )
        return TransientError(message, uri=self._uris)

    def _list(self, list_objects: _ListObjects) -> Listings:
        result: dict[str, Any] = {}
        num_ranks = 0
        options = self._options
        if (transfer := options.get("transfer")) is not None:
            options = {**options, "transfer": replace(transfer, max_requests_per_second=None)}
        try:
            listings = list_objects(options)
            data = zlib.compress(pickle.dumps(listings, 5), 1)
            num_ranks = self._close_round(self._wait_seconds)
            if num_ranks == self._world_size:
                result = self._publish(data)
            elif self._sharing.is_same_on_all_ranks:
                problem = f"{num_ranks} ranks built the dataset in {self._wait_seconds:g} s"
                raise self._error(problem)  # noqa: TRY301  the other ranks raise it, too
        except BaseException as exc:
            # After Ctrl-C, no rank is waited for.
            wait_seconds = self._wait_seconds if isinstance(exc, Exception) else 0.0
            num_ranks = num_ranks or self._close_round(wait_seconds)
            self._set_head(num_ranks, error=_portable(exc, f"rank {self._rank} listed"))
            raise
        self._set_head(num_ranks, **result)
        return listings

    def _close_round(self, wait_seconds: float) -> int:
        """Wait until all ranks have arrived, let no other rank join, and return their number."""
        name, num_polls = f"{self._name}/arrived", 0
        deadline = time.monotonic() + wait_seconds
        while self._store.add(name, 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(poll_seconds(num_polls, 1))
            num_polls += 1
            if num_polls == 100:  # ten seconds
                _log.warning("waiting for other ranks to build the dataset of %s", self._uris)
        num_ranks = int(self._store.add(name, _CLOSED)) % _CLOSED
        self._store.add(f"{self._rounds}/num_closed", 1)
        return num_ranks

    def _publish(self, data: bytes) -> dict[str, Any]:
        """Store the listing, and return the fields of the head that name it."""
        place = self._sharing.place
        if not fits_store(len(data), self._world_size, self._sharing.max_store_bytes):
            if isinstance(place, str):
                # Temporary keys: listings omit them, and `aioflux clean` finds them.
                uri = f"{place.rstrip('/')}/{TEMPORARY_PREFIX}listing/{uuid.uuid4().hex}"
                with sync.open_store(uri, **self._options) as store:
                    store.put("objects", data)
                return {"place": uri}
            _log.warning("share_listing= a uri is faster for the large listing of %s", self._uris)
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{self._name}/{number}", part)
        return {"num_parts": len(parts)}

    def _set_head(self, num_ranks: int, **result: Any) -> None:
        head = _Head(self._rank, self._uris, **result)
        self._store.set(f"{self._name}/head", pickle.dumps(head))
        self._count_exit(1 - num_ranks)

    def _receive(self) -> Listings | None:
        """Return the listing that the first rank made, or None if this rank must list."""
        try:
            head = self._wait_for_head()
            if head.uris != self._uris:
                raise ValueError(
                    f"rank {self._rank} builds a dataset of {self._uris}, and rank {head.rank} one "
                    f"of {head.uris}; build the same datasets in the same order on all ranks, and "
                    "others with share_listing=False"
                )
            parts = (f"{self._name}/{number}" for number in range(head.num_parts))
            data = b"".join(map(self._store.get, parts))
            if head.place:
                with sync.open_store(head.place, **self._options) as store:
                    data = store.get("objects")
        finally:
            with suppress(dist.DistError):  # the store ended, and the keys with it
                self._count_exit()
        if head.error is not None:
            raise head.error
        return pickle.loads(zlib.decompress(data)) if data else None  # noqa: S301  of this job

    def _wait_for_head(self) -> _Head:
        num_polls = 0
        wait_seconds = self._wait_seconds + self._timeout_seconds
        deadline = time.monotonic() + wait_seconds
        # Not `Store.wait`: it holds the lock of the connection, and delays Ctrl-C.
        while not self._store.check([f"{self._name}/head"]):
            if time.monotonic() > deadline:
                raise self._error(f"the rank that lists did not finish in {wait_seconds:g} s")
            time.sleep(poll_seconds(num_polls, self._world_size))
            num_polls += 1
        return self._read_head()

    def _read_head(self) -> _Head:
        head: _Head = pickle.loads(self._store.get(f"{self._name}/head"))  # noqa: S301  of this job
        return head

    def _count_exit(self, change: int = 1) -> None:
        """Count this rank; the last one of the round deletes the listing.

        The rank that lists subtracts the other ranks, after it has set the head. A rank that is
        interrupted counts itself before that. So the sum is 0 for the last rank only.
        """
        if self._store.add(f"{self._name}/left", change) != 0:
            return
        head = self._read_head()
        if head.place:
            try:
                with sync.open_store(head.place, **self._options) as store:
                    store.delete("objects")
            except StorageError as exc:  # `aioflux clean` will delete it
                _log.warning("could not delete the listing below %s: %s", head.place, exc)
        for name in ("head", "left", *map(str, range(head.num_parts))):
            self._store.delete_key(f"{self._name}/{name}")


def _portable(error: BaseException, note: str) -> Exception:
    """Return an error that other ranks can raise."""
    with suppress(Exception):  # an error that cannot be pickled is replaced
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  pickled here
        if isinstance(copy, Exception):
            copy.add_note(note)
            return copy
    return RuntimeError(f"{type(error).__name__}: {error} ({note})")

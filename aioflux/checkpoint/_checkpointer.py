"""Checkpointer: the checkpoints of one training run, below one uri.

    save_async:    state -> save plan (cached) -> one copy in memory -> SaveHandle
    in background: copy -> data object -> commit object -> delete old steps
    load:          newest step that passes verification -> state; if it cannot be loaded, the step
                   before

Each step is a complete checkpoint of `torch.distributed.checkpoint`, which stock DCP can load.

Over 500 lines because it is one public class, half of it signatures and docstrings.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import operator
import os
import secrets
import signal
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Unpack

import msgspec

from aioflux import _bridge
from aioflux._values.uri import PROBED_SCHEMES, parse_uri
from aioflux.checkpoint._format.commit import SaveFacts, StepInfo, new_save_id, step_prefix
from aioflux.checkpoint._load.state import load_below
from aioflux.checkpoint._load.stored_checkpoint import commit_bytes
from aioflux.checkpoint._save.handle import SaveHandle, wait_for_any
from aioflux.checkpoint._save.job import (
    Compression,
    Job,
    SaveResult,
    UploadSettings,
    plan_settings,
    plan_transfer,
)
from aioflux.checkpoint._save.loop_uploader import LoopUploader, Uploader
from aioflux.checkpoint._save.plan import ArenaLayout, CachingPlanner, StateSpec, describe_state
from aioflux.checkpoint._save.process_uploader import ProcessUploader
from aioflux.checkpoint._save.ranks import open_ranks
from aioflux.checkpoint._save.staging import Arena, Stager
from aioflux.checkpoint._schedule import Schedule, StopSignals
from aioflux.checkpoint._store import verify as _verify
from aioflux.checkpoint._store.history import SaveRecord, read_history
from aioflux.checkpoint._store.retention import Pruned, prune
from aioflux.checkpoint._store.retention_rules import Retention
from aioflux.checkpoint._store.steps import describe_steps, list_steps, uri_below
from aioflux.checkpoint.dcp import _load_step as _step
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from aioflux.store import open_store

if TYPE_CHECKING:
    from aioflux.checkpoint._load.stored_checkpoint import CommitBytes
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.checkpoint._store.verify import Verification
    from aioflux.checkpoint.compression import ZStandard
    from aioflux.options import StoreOptions
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_MAX_COPIES = 16
"""Copies that may wait for their upload. If uploads are slower than saves, more copies only delay
the moment at which training has to wait; in the other process, each copy is a file descriptor."""

_CHECK_SECONDS = 5.0
"""Timeout of the requests that the constructor sends."""


class _InFlight(NamedTuple):
    """A save in progress."""

    handle: SaveHandle
    arena: Arena | None
    pickled_bytes: int
    """Bytes of the staged state outside the arena: its pickled values, in each process."""


class Checkpointer:
    """Saver and loader of the checkpoints of one training run.

    With a process group, every rank builds a Checkpointer with the same arguments and makes the
    same calls. Several threads may call it; their saves and loads run one after another.

    The constructor sends no requests, except to an S3 endpoint that is not AWS's. There the
    coordinator checks, once in a process, which write preconditions the server compares: they are
    the only protection against two concurrent saves of one step. If the server ignores them, the
    constructor warns and saving raises UnsupportedError. With `S3Access(require_conditions=False)`
    saving works, but two runs that save one step at the same time may both report success. If the
    check fails, for example because the credentials are read-only, the first save repeats it.

    Args:
        uri: Prefix of the run, such as `gs://bucket/run-7`. A step is stored below this prefix, as
            in `gs://bucket/run-7/step-00000100/`.
        keep_last: Keep this number of the newest steps. A step stays if any `keep_` or `ttl_` rule
            keeps it; without any rule all steps stay.
        keep_every: Keep every step that this number divides.
        keep_best: Keep the step with the best metric, such as `("loss", "min")`; with a third
            element N, such as `("loss", "min", 3)`, keep the N best steps.
        ttl_seconds: Keep the steps that are younger than this, in seconds.
        staging: "thread" uploads in this process. "process" uploads in another process, which
            completes the upload of staged states even after this process has exited.
        every: Number of steps, or time, after which `should_save` returns True.
        compression: Compress tensors before the upload, for example with `ZStandard()`.
        max_staged_bytes: Memory for states that are not uploaded yet, in bytes; 4 GiB by default.
            `save_async` waits while a new state would exceed the limit, or 16 states are not
            uploaded. A single state may be larger than the limit. Two free copies stay for later
            saves until `close`, within the limit.
        commit_seconds: Timeout of ranks that wait for other ranks, in seconds; 600 by default.
        heartbeat_seconds: Interval of the heartbeats of each rank, in seconds; 10 by default. The
            first heartbeat is written after one interval, so a short save writes none. During its
            upload a rank also polls the other ranks at this interval. A rank without a new
            heartbeat for 2.5 intervals was killed or is suspended, for example by a debugger: the
            save fails on all other ranks. With `staging="process"`, the uploader process writes
            the heartbeats.
        process_group: The ranks that save together. Every rank of the group builds its Checkpointer
            at the same time. By default all ranks, or this process alone if torch.distributed is
            not initialised.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as for `aioflux.open_store`.

    Raises:
        ValueError: A setting is out of its range, or has no effect.
        TypeError: `staging="process"` with credentials that cannot be pickled.
    """

    upload_settings: ClassVar[UploadSettings] = UploadSettings()
    """Settings of uploads that the constructor has no argument for, such as the timeout for
    deleting the objects of a failed save. A subclass may replace them."""

    def __init__(
        self,
        uri: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str] | tuple[str, str, int] | None = None,
        ttl_seconds: float | None = None,
        staging: Literal["thread", "process"] = "thread",
        every: int | timedelta | None = None,
        compression: ZStandard | None = None,
        max_staged_bytes: int = 4 * 1024**3,
        commit_seconds: float = 600.0,
        heartbeat_seconds: float = 10.0,
        process_group: Any = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        if staging not in {"thread", "process"}:
            raise ValueError(f'staging must be "thread" or "process", not {staging!r}')
        if max_staged_bytes < 1:
            raise ValueError(f"max_staged_bytes must be above 0, not {max_staged_bytes!r}")
        credentials = options.get("credentials")
        if staging == "process" and getattr(credentials, "__module__", "") == "__main__":
            raise ValueError(
                f'staging="process" cannot use the credentials {credentials!r}: the uploader '
                "process cannot import __main__; define the credentials in another module"
            )
        settings = replace(
            self.upload_settings,
            commit_seconds=commit_seconds,
            heartbeat_seconds=heartbeat_seconds,
            retention=Retention(
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                ttl_seconds=ttl_seconds,
            ),
            compression=_without_torch(compression) if compression is not None else None,
        )
        self._ranks = open_ranks(process_group, commit_seconds)
        self._settings = plan_settings(settings, self._ranks.world_size)
        if options.get("transfer") is None and compression is None:  # which buffers whole parts
            options["transfer"] = plan_transfer(self._ranks.world_size)
        self._schedule = Schedule(every)
        self._signals = StopSignals()
        self._store = open_store(uri, **options)
        _bridge.close_when_dropped(self._store)
        kind = ProcessUploader if staging == "process" else LoopUploader
        self._uploader: Uploader = kind(self._store, self._settings)
        self._planner = CachingPlanner(self._ranks)
        self._stager = Stager(
            max_staged_bytes, is_shared=staging == "process", on_drop=self._uploader.release
        )
        self._lock = _bridge.ForkSafeLock()
        self._in_flight: list[_InFlight] = []
        self._done: list[SaveHandle] = []
        self._protected: set[int] = set()
        self._loaded_step: int | None = None
        self._is_closed = False
        self._is_released = False
        self._pid = os.getpid()
        _open.add(self)
        if self._ranks.is_coordinator and parse_uri(self._store.uri).scheme in PROBED_SCHEMES:
            self._check_conditions()

    @property
    def uri(self) -> str:
        """Uri of the prefix that contains all steps."""
        return self._store.uri

    @property
    def loaded_step(self) -> int | None:
        """The step of the last load, or None before a load. Retention keeps this step."""
        return self._loaded_step

    def _check_conditions(self) -> None:
        """Warn if the server ignores preconditions, which protect concurrent saves of one step."""
        try:
            missing = _bridge.run(_missing_conditions(self._store))
        except UnsupportedError as exc:
            warnings.warn(
                f"checkpoints below {self.uri} can be loaded but not saved: {exc}. With "
                "S3Access(require_conditions=False) saving works, but then only one run may save "
                "below this uri",
                RuntimeWarning,
                stacklevel=3,
            )
        except (AiofluxError, TimeoutError, TypeError, ValueError) as exc:
            # Wrong credentials, too: with the first save, every rank raises this error.
            _log.info(
                "could not check the preconditions of %s; the first save repeats the check: %r",
                self.uri,
                exc,
            )
        else:
            if {"create", "replace"} & set(missing):
                warnings.warn(
                    f"the server of {self.uri} ignores write preconditions: if two runs save the "
                    "same step at the same time, both may report success although one replaces "
                    "the other; give each run its own uri",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def __repr__(self) -> str:
        return f"<Checkpointer {self.uri}, rank {self._ranks.rank} of {self._ranks.world_size}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except AiofluxError as exc:
            if error is None:
                raise
            error.add_note(f"a save failed, too: {exc}")

    @property
    def is_stopping(self) -> bool:
        """Return whether a rank received a signal to stop: end the loop after the save."""
        return self._signals.is_agreed

    def should_save(self, step: int) -> bool:
        """Return whether to save after a step, because of `every` or of a signal to stop.

        Every rank must call this after every step; all ranks receive the same result. The call
        costs one small all-reduce if `every` is a time or `save_on_signal` was called, and no
        communication otherwise.

        Args:
            step: The step that was completed.
        """
        is_scheduled, signals = self._schedule.should_save(step), self._signals
        if not (self._schedule.is_timed or signals.is_installed):
            return is_scheduled
        # The clocks of ranks differ: if `every` is a time, only the coordinator's clock decides.
        vote = is_scheduled and (self._ranks.is_coordinator or not self._schedule.is_timed)
        any_scheduled, any_signal = self._ranks.largest([vote, signals.is_pending])
        if any_signal:
            if not signals.is_agreed:
                _log.warning("received a signal to stop: step %d is saved to %s", step, self.uri)
            signals.agree()
        elif signals.is_agreed and not signals.has_warned:
            signals.has_warned = True
            warnings.warn(
                f"step {step} of {self.uri}: training goes on after the save that a signal to stop "
                "requested; end the loop when is_stopping is true",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(any_scheduled or any_signal)

    def save_on_signal(self, *signals: int, deadline_seconds: float = 30.0) -> None:
        """Save once more when the process receives a signal to stop.

        After the signal, `should_save` returns True on all ranks until a save that began after the
        signal is committed, and `is_stopping` is true: end the loop then. This `save_async` does
        not wait for earlier saves in progress. It returns after the commit, and raises
        CheckpointError if the commit misses the deadline. If the loop goes on, there is one
        warning, and later saves follow the schedule again. Signal handlers that were installed
        before are called, too. Call this from the main thread.

        Args:
            signals: Numbers of the signals; SIGTERM by default.
            deadline_seconds: Time from the signal to the commit, in seconds; 30 by default, the
                time that Kubernetes and spot machines allow.
        """
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be above 0, not {deadline_seconds!r}")
        self._signals.install(signals or (signal.SIGTERM,), deadline_seconds)

    def prepare(self, state: Any) -> None:
        """Plan the saves of a state, and allocate memory for its copy in the background.

        Otherwise the first `save_async` does both. Call this on every rank when the state has all
        of its tensors: optimizers create theirs in their first step. `close` releases the memory.

        Args:
            state: The state that will be saved, as for `save_async`.

        Raises:
            AiofluxError: As for `save_async`.
        """
        with self._lock.current:
            self._require_open()
            spec, _, is_known = self._agree(0, state)
            plan, _ = self._planner.plan(spec, is_known=is_known)
            self._stager.prepare(plan.layout)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> SaveResult:
        """Save a state and wait until it is committed; see `save_async`."""
        return self.save_async(step, state, metrics).result()

    def save_async(
        self, step: int, state: Any, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Copy a state, and upload the copy in the background.

        Waits while more than `max_staged_bytes` or 16 states would be staged. If the step exists,
        it stays until the new save is committed.

        Args:
            step: Number of the training step, which names the checkpoint.
            state: A nested dictionary such as a state_dict, or an object with `state_dict`. Tied
                tensors, which share their memory, are stored once.
            metrics: The metrics that `keep_best` compares, such as `{"loss": 0.3}`.

        Returns:
            A handle of the upload. The copy is complete: the caller may change the state.

        Raises:
            AiofluxError: An earlier save failed, and its handle was not read. The new save is not
                started.
            CheckpointError: The state cannot be planned, for example because it has a sparse or
                quantized tensor; or a rank does not respond.
        """
        signals, num_signals = self._signals, self._signals.num_received
        is_urgent = signals.is_agreed and signals.is_pending
        with self._lock.current:
            handle = self._save(step, state, metrics or {}, is_urgent=is_urgent)
        if is_urgent:
            seconds = signals.seconds_left
            handle.wait(seconds)
            handle.add_done_callback(partial(signals.finish, num_signals))
            if not handle.done():
                raise CheckpointError(
                    f"step {step} of {self.uri} was not committed within the {seconds:.1f} s "
                    'before the deadline of a signal; with staging="process" the upload continues '
                    "after the process exits"
                )
            handle.result()
        return handle

    def _save(
        self, step: int, state: Any, metrics: Mapping[str, float], *, is_urgent: bool
    ) -> SaveHandle:
        self._require_open()
        started, clock = time.time(), time.perf_counter()
        step = _checked_step(step)
        self._reap()
        self._schedule.restart()
        spec, save_id, is_known = self._agree(step, state)
        with self._announced(step, save_id):
            plan, content = self._planner.plan(spec, is_known=is_known)
            self._wait_for_memory(plan.layout, is_urgent=is_urgent)
            job = Job(
                facts=SaveFacts(step=step, save_id=save_id, world_size=self._ranks.world_size),
                rank=self._ranks.rank,
                global_plan=plan.global_plan,
                protected=tuple(self._protected),
                started=started,
                is_urgent=is_urgent,
            )
            arena, failure = None, None
            try:
                numbers = {name: _checked_metric(name, value) for name, value in metrics.items()}
                job = replace(job, facts=msgspec.structs.replace(job.facts, metrics=numbers))
                job, arena = self._stager.stage(job, plan, content)
            except Exception as exc:
                # Submitted as a failure, because the other ranks wait for the outcome of this rank.
                failure = exc
                job = replace(job, failure=f"{type(exc).__name__}: {exc}")
            job = replace(job, staged_seconds=time.perf_counter() - clock)
            handle = self._submit(job, arena)
        if failure is not None:
            handle.exception()
            raise failure
        return handle

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self!r} is closed; build another")
        if self._pid != os.getpid():
            raise RuntimeError(f"{self!r} was built before a fork; build one in this process")

    @contextmanager
    def _announced(self, step: int, save_id: str) -> Iterator[None]:
        """Write the heartbeats of a save from now on, because staging may take long."""
        if self._ranks.world_size == 1:
            yield
            return
        self._uploader.start_heartbeat(save_id, step_prefix(step), self._ranks.rank)
        try:
            yield
        except BaseException:
            self._uploader.stop_heartbeat(save_id)  # no effect if the job was submitted
            raise

    def _wait_for_memory(self, layout: ArenaLayout, *, is_urgent: bool) -> None:
        """Wait until there is memory to stage a state with this layout."""
        # Frees arenas of saves that Ctrl-C interrupted after staging and before the upload.
        self._stager.reclaim(save.arena for save in self._in_flight)
        # The save after a signal has a deadline, and does not wait for memory.
        while not is_urgent and not self._has_room_for(layout):
            self._wait_for_any()

    def _has_room_for(self, layout: ArenaLayout) -> bool:
        pickled_bytes = [save.pickled_bytes for save in self._in_flight]
        pickled_bytes += pickled_bytes[-1:]  # an estimate for the new state, not pickled yet
        has_memory = self._stager.has_memory_for(layout, sum(pickled_bytes))
        return has_memory and len(self._in_flight) < _MAX_COPIES

    def _wait_for_any(self) -> None:
        wait_for_any([save.handle for save in self._in_flight])
        self._reap()

    def _submit(self, job: Job, arena: Arena | None) -> SaveHandle:
        """Pass a staged state to the uploader."""
        handle = SaveHandle(
            job.step,
            job.num_bytes,
            uri=self.uri,
            rank=job.rank,
            world_size=job.world_size,
        )
        try:
            pickled_bytes = job.num_bytes - job.arena_bytes
            pickled_bytes *= 2 if self._stager.is_shared else 1
            self._in_flight.append(_InFlight(handle, arena, pickled_bytes))
            self._uploader.submit(job, arena, handle)
        except BaseException as exc:  # such as Ctrl-C
            # If the upload has started, it continues, and uses its arena until it is complete.
            if not handle.is_attached:
                handle.set_outcome(exc)
                handle.exception()
            raise
        return handle

    def _agree(self, step: int, state: Any) -> tuple[StateSpec, str, bool]:
        """Agree with the other ranks on the step, the save id and whether to plan again.

        Returns:
            The spec of the state, the save id, and whether all ranks have a cached plan for it.
        """
        spec: StateSpec | None = None
        failure: BaseException | None = self._pop_unread_error()
        try:
            if failure is None:
                spec = describe_state(state.state_dict() if hasattr(state, "state_dict") else state)
        except Exception as exc:  # raised after the all-reduce, which the other ranks wait for
            failure = exc
        is_known = spec is not None and self._planner.is_known(spec)
        # Only the coordinator's clock and random number count. The other ranks pass 0, so that the
        # largest value is the coordinator's.
        now, token = (time.time_ns() // 1_000_000, secrets.randbits(32))
        if not self._ranks.is_coordinator:
            now = token = 0
        any_failed, any_unknown, max_step, negative_min_step, now, token = self._ranks.largest(
            [failure is not None, not is_known, step, -step, now, token]
        )
        if failure is not None:
            raise failure
        if any_failed:
            raise CheckpointError(
                f"step {step} of {self.uri} was not saved: another rank failed; see its error"
            )
        if max_step != -negative_min_step:
            raise ValueError(
                f"the ranks save different steps, {-negative_min_step} to {max_step}: rank "
                f"{self._ranks.rank} saves {step}; call save with the same step on all ranks"
            )
        assert spec is not None
        save_id = new_save_id(datetime.fromtimestamp(now / 1000, UTC), f"{token:08x}")
        return spec, save_id, not any_unknown

    def _reap(self) -> None:
        """Free the arenas of saves that are committed or have failed."""
        for save in [save for save in self._in_flight if save.handle.done()]:
            self._in_flight.remove(save)
            self._done.append(save.handle)
            if save.arena is not None:
                self._stager.free(save.arena)

    def _pop_unread_error(self) -> BaseException | None:
        """Return the first error that no caller has read from its handle, and log the others."""
        self._reap()
        done, self._done = self._done, []
        errors = [error for handle in done if (error := handle.pop_unread_error()) is not None]
        for error in errors[1:]:
            _log.error("a save to %s failed: %s", self.uri, error)
        return errors[0] if errors else None

    def load(
        self,
        step: int | None = None,
        into: Any = None,
        *,
        map_location: Any = None,
        weights_only: bool = True,
    ) -> Any:
        """Load a state, by default from the newest step that passes verification.

        If the load finds that this step is damaged, it warns and loads the step before it. This
        repeats until an intact step is loaded.

        Args:
            step: Load only this step, never an earlier one.
            into: A state whose tensors are filled in place, or an object with `state_dict` and
                `load_state_dict`. Needed if tensors are sharded across ranks. Dictionaries with
                string keys select what is loaded: each of their keys must be in the checkpoint, and
                other keys of the checkpoint are skipped. Lists, empty dictionaries and dictionaries
                with a key that is not a string are replaced as a whole by their saved value.
            map_location: Device of the tensors, as in `torch.load`; only without `into`.
            weights_only: Reject pickled values that could run code when they are loaded.

        Returns:
            The state with the structure that was saved, or `into`.

        Raises:
            CheckpointNotFoundError: The step does not exist; without `step`, no step can be loaded.
            CheckpointCorruptError: The step is damaged.
            CheckpointError: A key of `into` is not in the checkpoint, or has another size there.
        """
        if into is not None and map_location is not None:
            raise ValueError("map_location has no effect with into: its tensors keep their devices")
        failure: BaseException | None = None
        failed_step: int | None = None
        with self._lock.current:
            for candidate, known in self._candidates(step):
                uri = uri_below(self._store, step_prefix(candidate))
                if failed_step is not None and candidate < failed_step:
                    _warn(f"{uri} is loaded, because a newer step cannot be loaded: {failure}", 3)
                failure, failed_step = None, candidate
                try:
                    loaded = self._load_from(candidate, known, into, map_location, weights_only)
                except Exception as exc:  # raised after the all-reduce, which other ranks wait for
                    failure = exc
                is_damaged = isinstance(failure, CheckpointCorruptError | CheckpointNotFoundError)
                (worst,) = self._ranks.largest([0 if failure is None else 1 if is_damaged else 2])
                if not worst:
                    self._protected.add(candidate)
                    self._loaded_step = candidate
                    return loaded
                if failure is None:
                    failure = CheckpointError(
                        f"another rank could not load {uri}; see the error of that rank"
                    )
                if worst == 2:
                    raise failure
        if step is not None and failure is not None:
            raise failure
        raise CheckpointNotFoundError(
            f"there is no checkpoint below {self.uri} that can be loaded; `aioflux ckpt verify` "
            "shows the problems of each step"
        )

    def _load_from(
        self,
        step: int,
        known: CommitBytes | None,
        into: Any,
        map_location: Any,
        weights_only: bool,
    ) -> Any:
        store, prefix = self._store, step_prefix(step)
        if into is None:
            return load_below(
                store, prefix, known=known, map_location=map_location, weights_only=weights_only
            )
        _step.load_into(store, prefix, into, self._ranks, known=known, weights_only=weights_only)
        return into

    def _candidates(self, step: int | None) -> Iterator[tuple[int, CommitBytes | None]]:
        """Yield the steps to load, the same on all ranks: the coordinator verifies the steps.

        On the coordinator, each has the commit object that was verified.
        """
        valid = self._valid_steps(step) if self._ranks.is_coordinator else iter(())
        known: CommitBytes | None = None

        def following() -> int | None:
            nonlocal known
            candidate, found = next(valid, (None, None))
            if candidate is not None and found is not None:
                known = commit_bytes(found, step_prefix(candidate))
            return candidate

        while (candidate := self._ranks.on_coordinator(following)) is not None:
            yield candidate, known
            known = None

    def _valid_steps(self, step: int | None) -> Iterator[tuple[int, CommitObject | None]]:
        """Yield the steps that pass verification with their commit objects, newest first.

        A step is yielded once more if it was replaced after it was yielded.
        """
        if step is not None:
            results: Iterable[Verification] = [self.verify(step)]
        else:
            results = _bridge.iterate(_verify.newest_first(self._store, relist=True))
        for first in results:
            result = first if step is None else replace(first, step=step)
            while result.step is not None and (result.is_valid or step is not None):
                yield result.step, result.found
                newer = self.verify(result.step)
                if newer.generation in {"", result.generation}:
                    break
                result = newer
            else:
                problem = result.problems[0].message
                # From here to the caller of `load`: `following`, `on_coordinator`, `_candidates`.
                _warn(f"{first.uri} failed verification and is not loaded: {problem}", 7)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, without verifying them."""
        return _bridge.run(list_steps(self._store))

    def latest(self, *, deep: bool = False) -> int | None:
        """Return the newest step that passes verification, or None.

        Args:
            deep: Read all bytes of a step and compare their checksums.
        """
        return _bridge.run(_verify.latest(self._store, deep=deep))

    def verify(self, step: int, *, deep: bool = False) -> Verification:
        """Check that all objects of a step exist, and return the problems.

        Args:
            step: Number of the step.
            deep: Read all bytes of the step and compare their checksums.
        """
        return _bridge.run(_verify.verify(self._store, step_prefix(step), deep=deep))

    def history(self) -> list[SaveRecord]:
        """Return one record of each save, failed saves included, oldest first.

        A process that is killed right after a save may leave no record of it; `steps` has the step.
        """
        self._uploader.wait_for_records()
        return _bridge.run(read_history(self._store))

    def list(self) -> list[StepInfo]:
        """Return the facts of the committed steps, ascending, without verifying them.

        Costs one listing, and one or two requests for each step. A step whose commit object is
        damaged has a `problem`.
        """
        return _bridge.run(describe_steps(self._store))

    def prune(self, *, dry_run: bool = False) -> Pruned:
        """Remove the steps that no retention rule keeps, as each save does after its commit.

        Call this on one rank only.

        Args:
            dry_run: Remove nothing, and return the steps that would be removed.
        """
        return _bridge.run(
            prune(
                self._store,
                self._settings.retention,
                now=time.time(),
                protected=self._protected,
                dry_run=dry_run,
            )
        )

    def finish_at_exit(self) -> None:
        """Wait for uploads in this process, and log errors that no caller has read."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._uploader.wait_at_exit([save.handle for save in self._in_flight])
        if (failure := self._pop_unread_error()) is not None:
            _log.error("a save to %s failed, and its handle was not read: %s", self.uri, failure)

    def close(self) -> None:
        """Wait for all saves, and release memory and connections. A second call does nothing.

        If Ctrl-C interrupts the call, call `close` again to continue.

        Raises:
            AiofluxError: A save failed, and its handle was not read.
        """
        with self._lock.current:
            if self._is_released:
                return
            while self._in_flight:
                self._wait_for_any()
            self._is_closed = True
            _open.discard(self)
            self._signals.restore()
            self._stager.reclaim(())
            self._stager.close()
            self._uploader.close()
            self._ranks.close()
            _bridge.run(self._store.aclose())
            self._is_released = True
            failure = self._pop_unread_error()
            if failure is not None:
                raise failure


async def _missing_conditions(store: Store) -> Sequence[str]:
    async with asyncio.timeout(_CHECK_SECONDS):
        return await store.check_conditions()


def _without_torch(compression: ZStandard) -> Compression:
    """Return the settings of a compression in a class that needs no torch, for the uploader."""
    return Compression(
        level=compression.level,
        threads=compression.threads,
        byte_planes=compression.byte_planes,
        descriptor=compression.get_descriptor(),
    )


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _at_exit() -> None:
    """Wait for the saves of every Checkpointer that is not closed, and log failures."""
    for checkpointer in list(_open):
        checkpointer.finish_at_exit()


atexit.register(_at_exit)


def _warn(message: str, stacklevel: int) -> None:
    """Log and warn that the newest step cannot be loaded."""
    _log.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)


def _checked_step(step: Any) -> int:
    """Return a step as an int.

    Raises:
        TypeError: `step` is not an integer.
        ValueError: `step` is negative.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"a step is a whole number, not {step!r}")
    number = operator.index(step)
    step_prefix(number)
    return number


def _checked_metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as exc:  # RuntimeError by some versions of torch
        raise TypeError(
            f"the metric {name!r} is {value!r:.100}, which is not a number; pass a float such as "
            "float(loss)"
        ) from exc

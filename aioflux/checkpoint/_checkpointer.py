"""Checkpointer: the checkpoints of one training run, below one uri.

    save_async:  state -> plan (kept) -> staged (one copy) -> handle          training continues
                 staged -> data object -> commit -> old steps removed         beside it
    load:        newest step that verifies -> state, or the step before

Each step is a checkpoint of `torch.distributed.checkpoint` of its own: stock DCP loads it, too.

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
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from aioflux import _bridge
from aioflux.checkpoint._format.commit import new_save_id, step_prefix
from aioflux.checkpoint._maintain import verify as _verify
from aioflux.checkpoint._maintain.history import SaveRecord, read_history
from aioflux.checkpoint._maintain.retention import Pruned, prune
from aioflux.checkpoint._maintain.retention_rules import Retention
from aioflux.checkpoint._save.handle import SaveHandle, wait_for_any
from aioflux.checkpoint._save.job import (
    Compression,
    Job,
    SaveResult,
    StagedState,
    UploadSettings,
)
from aioflux.checkpoint._save.loop_uploader import LoopUploader, Uploader
from aioflux.checkpoint._save.process_uploader import ProcessUploader
from aioflux.checkpoint._save.ranks import open_ranks
from aioflux.checkpoint._save.staging import Arena, ArenaLayout, Stager
from aioflux.checkpoint._save.state_spec import (
    CachingPlanner,
    RankSavePlan,
    StateSpec,
    describe_state,
)
from aioflux.checkpoint._schedule import Schedule, StopSignals
from aioflux.checkpoint._store.commits import list_steps, uri_below
from aioflux.checkpoint.dcp import _load_step as _step
from aioflux.checkpoint.dcp import load_state
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from aioflux.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Unpack

    from aioflux.checkpoint._maintain.verify import Verification
    from aioflux.checkpoint.compression import ZStandard
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["Checkpointer"]

_log = logging.getLogger("aioflux")

_CHECK_SECONDS = 5.0
"""Time that the constructor takes at most for a server that does not answer."""


class _InFlight(NamedTuple):
    """A save under way."""

    handle: SaveHandle
    arena: Arena | None
    pickled_bytes: int
    """Bytes that are in no arena."""


class Checkpointer:
    """Saves and loads the checkpoints of one training run.

    With a process group every rank builds one with the same arguments and makes the same calls.
    One thread at a time is served; others wait.

    The constructor sends nothing, except to an S3 endpoint that is not AWS's. There the coordinator
    checks, once in a process, which conditions of writes the server compares: two saves of one step
    are kept apart by them alone. On a server that ignores them it warns, and saving raises
    UnsupportedError; with `S3Access(require_conditions=False)` saving works, and two runs that save
    one step at the same time may both report success. If the check is impossible, such as with
    credentials that may only read, the first save repeats it.

    Args:
        uri: Prefix of the run, such as `gs://bucket/run-7`; `step-00000100/` and so on follow.
        keep_last: Number of the newest steps to keep. Without any of these rules all are kept.
        keep_every: Keep every step that this number divides.
        keep_best: Keep the step of the best metric, `("loss", "min")`; or the N best steps, with
            a number N as third.
        ttl_seconds: Keep steps that are younger, in seconds.
        staging: Upload by a "thread" of this process, or by a "process" that outlives it and
            finishes what was staged.
        every: Number of steps, or time, after which `should_save` returns True.
        compression: Compress tensors on their way, such as `ZStandard()`.
        max_staged_bytes: Memory for states that are not uploaded yet, in bytes; 4 GiB by default.
            `save_async` waits if there is no more; one state alone may be larger.
        commit_seconds: Time for which ranks wait for each other, in seconds; 600 by default.
        heartbeat_seconds: Time between two heartbeats of a rank whose save takes longer than that,
            in seconds; 10 by default. While it uploads it lists at these times what the other ranks
            wrote. A rank that is silent for 2.5 times as long is gone, and the save fails on all
            others: it was killed, or is suspended, as in a debugger. With `staging="process"` this
            is about the process that uploads.
        process_group: The ranks that save together; all by default, or this process alone if
            torch.distributed is not initialised. Every rank of it builds one at the same time.
        options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context`,
            as `aioflux.open_store`.

    Raises:
        ValueError: A setting is out of its range, or has no effect.
        TypeError: `staging="process"` with credentials that do not pickle.
    """

    upload_settings: ClassVar[UploadSettings] = UploadSettings()
    """Times of uploads that have no argument, such as that of the removal of a failed save; a
    subclass may replace it."""

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
        if staging == "process":
            _check_importable(options.get("credentials"))
        self._settings = replace(
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
        self._schedule = Schedule(every)
        self._signals = StopSignals()
        self._options = options
        self._store = open_store(uri, **options)
        _bridge.close_when_dropped(self._store)
        kind = ProcessUploader if staging == "process" else LoopUploader
        self._uploader: Uploader = kind(self._store, self._settings)
        self._ranks = open_ranks(process_group, commit_seconds)
        self._planner = CachingPlanner(self._ranks)
        self._stager = Stager(
            max_staged_bytes, is_shared=staging == "process", on_drop=self._uploader.release
        )
        self._lock = _bridge.ForkSafeLock()
        self._in_flight: list[_InFlight] = []
        self._ended: list[SaveHandle] = []
        self._protected: set[int] = set()
        self._loaded_step: int | None = None
        self._is_closed = False
        self._is_released = False
        self._pid = os.getpid()
        _open.add(self)
        if self._ranks.is_coordinator and self._store.uri.startswith("s3://"):
            self._check_conditions()

    @property
    def uri(self) -> str:
        """Uri that the steps are below."""
        return self._store.uri

    @property
    def loaded_step(self) -> int | None:
        """The step that was loaded last, or None. Retention keeps it."""
        return self._loaded_step

    def _check_conditions(self) -> None:
        """Warn if the server ignores the conditions by which saves are kept apart."""
        try:
            missing = _bridge.run(_missing_conditions(self._store))
        except UnsupportedError as exc:
            warnings.warn(
                f"checkpoints below {self.uri} can be loaded, and saving is refused: {exc}; one "
                "writer for each run is needed then",
                RuntimeWarning,
                stacklevel=3,
            )
        except (AiofluxError, TimeoutError) as exc:
            _log.info("whether saves to %s are safe is not known yet: %r", self.uri, exc)
        else:
            if {"create", "replace"} & set(missing):
                warnings.warn(
                    f"the server of {self.uri} ignores conditions of writes: of two runs that save "
                    "one step at the same time both may report success, and one of them is lost; "
                    "use one writer for each run",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def __repr__(self) -> str:
        return f"<Checkpointer {self.uri}, rank {self._ranks.rank} of {self._ranks.world_size}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except AiofluxError as exc:
            if error is None:
                raise
            error.add_note(f"and a save failed: {exc}")

    @property
    def is_stopping(self) -> bool:
        """Return whether a rank received a signal to stop: the next save is the last one."""
        return self._signals.is_agreed

    def should_save(self, step: int) -> bool:
        """Return whether to save after a step: it is due by `every`, or a rank received a signal.

        Every rank calls it after every step, and gets the same answer. It costs a small all-reduce
        if `every` is a time or signals are handled, and nothing otherwise.

        Args:
            step: The step that was completed.
        """
        is_due, signals = self._schedule.is_due(step), self._signals
        if not (self._schedule.is_timed or signals.is_installed):
            return is_due
        # Clocks differ: by time, the coordinator's alone decides.
        mine = is_due and (self._ranks.is_coordinator or not self._schedule.is_timed)
        due, asked = self._ranks.largest([mine, signals.is_asked])
        if asked and not signals.is_agreed:
            signals.agree()
            _log.warning("asked to stop: step %d is saved to %s, as the last one", step, self.uri)
        return bool(due or asked)

    def save_on_signal(self, *signals: int, deadline_seconds: float = 30.0) -> None:
        """Save once more when the process receives a signal to stop.

        The next `should_save` then returns True on all ranks, and `is_stopping` is true. The save
        that follows overtakes all that are under way, waits for its commit and fails if that does
        not come in time. Earlier handlers of the signals are called, too. Call this from the main
        thread.

        Args:
            signals: Numbers of the signals; SIGTERM by default.
            deadline_seconds: Time from the signal to the commit, in seconds; 30 by default, as
                Kubernetes and spot machines allow.
        """
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be above 0, not {deadline_seconds!r}")
        self._signals.install(signals or (signal.SIGTERM,), deadline_seconds)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> SaveResult:
        """Save a state and wait until it is committed; see `save_async`."""
        return self.save_async(step, state, metrics).result()

    def save_async(
        self, step: int, state: Any, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save a state: copy it, and return while it is uploaded.

        Waits while more than `max_staged_bytes` would be staged. A step that exists is replaced
        when the new one is committed, not before.

        Args:
            step: The training step, which names the checkpoint.
            state: A dictionary such as a state_dict, of any nesting, or an object with
                `state_dict`. Tied tensors, which share their memory, are stored once.
            metrics: The metrics that `keep_best` compares, such as `{"loss": 0.3}`.

        Returns:
            A handle. The state is copied by then, and may be changed.

        Raises:
            AiofluxError: An earlier save failed, and its handle was not read. This one is not
                started.
            CheckpointError: The state cannot be planned, as one with a sparse or quantized tensor,
                or a rank does not answer.
        """
        with self._lock.current:
            handle = self._save(step, state, metrics or {})
        if self.is_stopping:
            seconds = self._signals.seconds_left
            handle.wait(seconds)
            if not handle.done():
                raise CheckpointError(
                    f"step {step} of {self.uri} was not committed within the {seconds:.1f} s that "
                    'were left after a signal; staging="process" would finish it'
                )
            handle.result()
        return handle

    def _save(self, step: int, state: Any, metrics: Mapping[str, float]) -> SaveHandle:
        if self._is_closed:
            raise ValueError(f"{self!r} is closed; open another")
        if self._pid != os.getpid():
            raise RuntimeError(f"{self!r} was built before a fork; build one in this process")
        started, clock = time.time(), time.perf_counter()
        step = _checked_step(step)
        self._reap()
        self._schedule.restart()
        spec, save_id, is_known = self._agree(step, state)
        with self._announced(step, save_id):
            plan = self._planner.plan(spec, is_known=is_known)
            layout = self._wait_for_memory(plan)
            staged, arena, numbers, failure = StagedState(), None, dict[str, float](), None
            try:
                numbers = {name: float(value) for name, value in metrics.items()}
                staged, arena = self._stager.stage(plan, layout)
            except Exception as exc:  # the other ranks wait for the outcome of this one
                failure, numbers = exc, {}
            job = Job(
                step=step,
                save_id=save_id,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                staged=staged,
                global_plan=plan.global_plan,
                metrics=numbers,
                protected=tuple(self._protected),
                started=started,
                is_urgent=self.is_stopping,
                staged_seconds=time.perf_counter() - clock,
                failure=f"{type(failure).__name__}: {failure}" if failure is not None else "",
            )
            handle = self._submit(job, arena)
        if failure is not None:
            handle.exception()
            raise failure
        return handle

    @contextmanager
    def _announced(self, step: int, save_id: str) -> Iterator[None]:
        """Write the heartbeats of a save from now on: staging it may take long."""
        if self._ranks.world_size == 1:
            yield
            return
        self._uploader.announce(save_id, step_prefix(step), self._ranks.rank)
        try:
            yield
        except BaseException:
            self._uploader.withdraw(save_id)  # unless it was submitted
            raise

    def _wait_for_memory(self, plan: RankSavePlan) -> ArenaLayout:
        """Wait until there is memory to stage a plan, and return its layout."""
        layout = self._stager.lay_out(plan)
        # Arenas that an interrupt left between staging and upload.
        self._stager.reclaim(each.arena for each in self._in_flight)
        # The last save has a deadline, and does not wait.
        while not self.is_stopping and not self._stager.has_memory_for(
            layout, sum(each.pickled_bytes for each in self._in_flight)
        ):
            self._wait_for_any()
        return layout

    def _wait_for_any(self) -> None:
        wait_for_any([each.handle for each in self._in_flight])
        self._reap()

    def _submit(self, job: Job, arena: Arena | None) -> SaveHandle:
        """Pass a staged state to the uploader."""
        handle = SaveHandle(
            job.step,
            job.staged.num_bytes,
            uri=self.uri,
            rank=job.rank,
            world_size=job.world_size,
        )
        try:
            pickled_bytes = job.staged.num_bytes - job.staged.size
            self._in_flight.append(_InFlight(handle, arena, pickled_bytes))
            self._uploader.submit(job, arena, handle)
        except BaseException as exc:  # such as Ctrl-C
            # A job that was submitted still runs, and uses its arena until it ends.
            if not handle.is_attached:
                handle.end(exc)
                handle.exception()
            raise
        return handle

    def _agree(self, step: int, state: Any) -> tuple[StateSpec, str, bool]:
        """Agree with the other ranks on a save.

        Returns:
            The spec of the state, the name of the save, and whether all ranks know a plan for it.
        """
        spec: StateSpec | None = None
        failure: BaseException | None = self._unseen_error()
        try:
            if failure is None:
                spec = describe_state(state.state_dict() if hasattr(state, "state_dict") else state)
        except Exception as exc:  # the other ranks come to the same point, and fail with this one
            failure = exc
        is_known = spec is not None and self._planner.is_known(spec)
        now, token = (time.time_ns() // 1_000_000, secrets.randbits(32))
        if not self._ranks.is_coordinator:
            now = token = 0
        most = self._ranks.largest([failure is not None, not is_known, step, -step, now, token])
        if failure is not None:
            raise failure
        if most[0]:
            raise CheckpointError(
                f"step {step} of {self.uri} was not saved: another rank met an error before"
            )
        if most[2] != -most[3]:
            raise ValueError(
                f"the ranks save different steps: rank {self._ranks.rank} has {step}, and there "
                f"are {-most[3]} to {most[2]}"
            )
        assert spec is not None
        save_id = new_save_id(datetime.fromtimestamp(most[4] / 1000, UTC), f"{most[5]:08x}")
        return spec, save_id, not most[1]

    def _reap(self) -> None:
        """Take back the memory of saves that have ended."""
        for each in [each for each in self._in_flight if each.handle.done()]:
            self._in_flight.remove(each)
            self._ended.append(each.handle)
            if each.arena is not None:
                self._stager.free(each.arena)

    def _unseen_error(self) -> BaseException | None:
        """Return the first error of an earlier save that was not read from its handle."""
        self._reap()
        ended, self._ended = self._ended, []
        errors = [error for handle in ended if (error := handle.take_error()) is not None]
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
        """Load a state, by default of the newest step that verifies.

        If that cannot be read the one before is loaded, with a warning; and so on.

        Args:
            step: Load this one and no other.
            into: A state whose tensors are filled in place, or an object with `state_dict` and
                `load_state_dict`. Needed if tensors are sharded across ranks. Dictionaries with
                strings for keys select what is loaded: each of their keys must be stored, and other
                stored keys are skipped. Lists, dictionaries with other keys, empty dictionaries and
                all values below them are replaced by those that were saved.
            map_location: Device of the tensors, as in `torch.load`; without `into` only.
            weights_only: Reject values that could run code.

        Returns:
            The state: nested as it was saved, or `into`.

        Raises:
            CheckpointNotFoundError: There is no such step, or none at all.
            CheckpointCorruptError: The step does not verify; without `step`, no step does.
            CheckpointError: `into` has something that is not stored, or in another size.
        """
        if into is not None and map_location is not None:
            raise ValueError("map_location has no effect with into: its tensors are where they are")
        failure: BaseException | None = None
        failed: int | None = None
        with self._lock.current:
            for found in self._candidates(step):
                uri = uri_below(self._store, step_prefix(found))
                if failed is not None and found < failed:
                    _warn(f"{uri} is loaded, because a newer step cannot be: {failure}")
                failure, failed = None, found
                try:
                    loaded = self._load_from(uri, into, map_location, weights_only)
                except Exception as exc:  # the other ranks load at the same time, and fail with it
                    failure = exc
                is_skipped = isinstance(failure, CheckpointCorruptError | CheckpointNotFoundError)
                (worst,) = self._ranks.largest([0 if failure is None else 1 if is_skipped else 2])
                if not worst:
                    self._protected.add(found)
                    self._loaded_step = found
                    return loaded
                if failure is None:
                    failure = CheckpointError(f"another rank could not load {uri}")
                if worst == 2:
                    raise failure
        if step is not None and failure is not None:
            raise failure
        raise CheckpointNotFoundError(
            f"there is no checkpoint below {self.uri} that can be loaded; `aioflux ckpt verify` "
            "shows what is wrong with those that are there"
        )

    def _load_from(self, uri: str, into: Any, map_location: Any, weights_only: bool) -> Any:
        if into is None:
            return load_state(
                uri, map_location=map_location, weights_only=weights_only, **self._options
            )
        _step.load_into(uri, into, self._ranks, weights_only=weights_only, options=self._options)
        return into

    def _candidates(self, step: int | None) -> Iterator[int]:
        """Yield the steps to try, the same on all ranks: the coordinator verifies them."""
        valid = self._valid_steps(step) if self._ranks.is_coordinator else iter(())
        while True:
            found: int | None = None
            failure: AiofluxError | None = None
            try:
                found = next(valid, None)
            except AiofluxError as exc:
                failure = exc
            found, failure = self._ranks.broadcast((found, failure))
            if failure is not None:
                raise failure
            if found is None:
                return
            yield found

    def _valid_steps(self, step: int | None) -> Iterator[int]:
        """Yield the steps that verify; one that was replaced while it was loaded once more."""
        if step is not None:
            results: Iterable[Verification] = [self.verify(step)]
        else:
            results = _bridge.iterate(_verify.newest_first(self._store, repeats=True))
        for first in results:
            found = first if step is None else replace(first, step=step)
            while found.step is not None and (found.is_valid or step is not None):
                yield found.step
                again = self.verify(found.step)
                if again.generation in {"", found.generation}:
                    break
                found = again
            else:
                why = first.problems[0].message if first.problems else "it has no step"
                _warn(f"{first.uri} does not verify, and the step before is tried: {why}")

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; they are not verified."""
        return _bridge.run(list_steps(self._store))

    def latest(self, *, deep: bool = False) -> int | None:
        """Return the newest step that verifies, or None.

        Args:
            deep: Read all of its bytes and compare their checksums.
        """
        return _bridge.run(_verify.latest(self._store, deep=deep))

    def verify(self, step: int, *, deep: bool = False) -> Verification:
        """Check that all objects of a step are there, and return what is wrong.

        Args:
            step: The step.
            deep: Read all of its bytes and compare their checksums.
        """
        return _bridge.run(_verify.verify(self._store, step_prefix(step), deep=deep))

    def history(self) -> list[SaveRecord]:
        """Return one record of each save, failed ones included, by time."""
        return _bridge.run(read_history(self._store))

    def prune(self, *, dry_run: bool = False) -> Pruned:
        """Remove the steps that no rule keeps, as each save does after its commit.

        Call it on one rank.

        Args:
            dry_run: Only return what would be removed.
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
        """Wait for saves that cannot outlive the process, and log a failure; `close` raises it."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._uploader.wait_at_exit([each.handle for each in self._in_flight])
        if (failure := self._unseen_error()) is not None:
            _log.error("a save to %s failed, and its handle was not read: %s", self.uri, failure)

    def close(self) -> None:
        """Wait for all saves, and release memory and connections. Closing twice does nothing.

        After an interrupt it continues when it is called again.

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
            failure = self._unseen_error()
            if failure is not None:
                raise failure


async def _missing_conditions(store: Store) -> Sequence[str]:
    async with asyncio.timeout(_CHECK_SECONDS):
        return await store.check_conditions()


def _check_importable(credentials: object) -> None:
    if getattr(credentials, "__module__", "") == "__main__":
        raise ValueError(
            f'staging="process" cannot use the credentials {credentials!r}: the process that '
            "uploads cannot import __main__; put the function into a module of its own"
        )


def _without_torch(compression: ZStandard) -> Compression:
    """Return the settings of a compression for the uploader, which needs no torch."""
    return Compression(
        level=compression.level,
        threads=compression.threads,
        byte_planes=compression.byte_planes,
        descriptor=compression.get_descriptor(),
    )


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _at_exit() -> None:
    """Wait for what was not closed, and log what failed."""
    for each in list(_open):
        each.finish_at_exit()


atexit.register(_at_exit)


def _warn(message: str) -> None:
    """Report that a step other than the newest is loaded: in the log, and as a warning."""
    _log.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _checked_step(step: Any) -> int:
    """Return a step as an int.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"a step is a whole number, not {step!r}")
    number = operator.index(step)
    step_prefix(number)
    return number

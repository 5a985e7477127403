"""RayCheckpointer: checkpoints of a run of Ray Train, committed by aioflux, deleted by Ray.

    all workers:  save_async -> ray.train.report, whose thread waits for the commit
    controller:   receives the report of a committed step -> deletes steps (`num_to_keep`)

The steps are below the storage path of the run, so that Ray can delete them. No data is copied to
a local directory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode

from aioflux import _bridge
from aioflux._values.uri import join_uri
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint._format.commit import parse_step, step_prefix
from aioflux.checkpoint._store.steps import read_commit
from aioflux.errors import AiofluxError, CheckpointNotFoundError
from aioflux.integrations.ray._storage import find_storage, path_of, run_storage

if TYPE_CHECKING:
    from aioflux.checkpoint import SaveHandle
    from aioflux.checkpoint._store.history import SaveRecord

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_UPLOAD_MODES = (CheckpointUploadMode.ASYNC, CheckpointUploadMode.SYNC)
_RETENTION = ("keep_last", "keep_every", "keep_best", "ttl_seconds")
_WEIGHTS_KEY = "weights"
"""Prefix of the saves of weights only, below the uri of the checkpoints."""
_NUM_MEASURED = 5
"""Number of the newest saves, of which the slowest one gives the expected rate."""
_UNKNOWN_DEADLINE_SECONDS = 120.0
"""Time until Ray ends the workers if a preemption has no deadline: Ray's constant
`DEFAULT_PREEMPTION_DEADLINE_S`, which is private."""


class RayCheckpointer(Checkpointer):
    """Saver and loader of the checkpoints of a worker of Ray Train.

        with RayCheckpointer(every=100) as checkpoints:
            first = (checkpoints.restore(training) or 0) + 1
            for step in range(first, 1001):
                ...
                if checkpoints.should_save(step):
                    checkpoints.report(step, training, {"loss": loss})

    All workers make the same calls. Ray deletes old steps, by `CheckpointConfig(num_to_keep=)`.

    Args:
        uri: Prefix of the checkpoints. By default the directory of the run in the storage of its
            `RunConfig`; another uri must be below it. Required in Ray's local mode, which has no
            storage.
        weights: Keys of the state that are saved if a save of the whole state would miss the
            deadline of a preemption. If the state has none of them, it is always saved as a whole.
        preemption_every: Number of steps after which `should_save` checks for a preemption, which
            waits for all workers.
        settings: Other settings of `Checkpointer`, and options of `open_store`. By default they are
            the options of `storage_filesystem`.

    Raises:
        ValueError: A rule of retention is set, Ray cannot find checkpoints at `uri`, or
            torch.distributed has another number of ranks than the run has workers.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        weights: Sequence[str] = ("model", "values"),
        preemption_every: int = 1,
        **settings: Any,
    ) -> None:
        if given := [name for name in _RETENTION if settings.get(name) is not None]:
            raise ValueError(
                f"{given[0]} has no effect with Ray Train, which deletes the checkpoints: set "
                "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
            )
        if isinstance(weights, str):
            raise TypeError(f"weights must be a list of keys, such as [{weights!r}]")
        if preemption_every < 1:
            raise ValueError(f"preemption_every must be above 0, not {preemption_every!r}")
        num_workers = ray.train.get_context().get_world_size()
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if settings.get("process_group") is None and num_ranks != num_workers:
            raise ValueError(
                f"the run has {num_workers} workers, but torch.distributed has {num_ranks} ranks: "
                "use TorchTrainer, or pass process_group="
            )
        uri, self._filesystem, options = find_storage(uri, settings)
        not_of_weights = {*_RETENTION, "every", "staging"}
        self._weights_options = {
            name: value for name, value in options.items() if name not in not_of_weights
        }
        super().__init__(uri, **options)
        self._is_local_mode = run_storage() is None
        self._weights_names = tuple(weights)
        self._weights: Checkpointer | None = None
        self._preemption_every = preemption_every
        self._preempted_nodes: set[str] = set()
        self._deadline: float | None = None
        """Deadline of the save of the next report, after a preemption; in seconds since 1970."""
        latest = ray.train.get_checkpoint()
        self._step_at_start = -1 if latest is None else _step_of(latest)
        self._reported = {self._step_at_start}

    @property
    def weights_uri(self) -> str:
        """Uri of the saves of weights only, for `Checkpointer(uri).load()`."""
        return join_uri(self.uri, _WEIGHTS_KEY)

    def restore(self, state: Any) -> int | None:
        """Load the newest committed step into a state, and return the step.

        The step may have been committed before a worker died, and not been reported to Ray.
        `restore` reports such steps, with those of their metrics that are finite numbers. As in
        Ray, a run with the name and the storage of an earlier run continues that run.

        Args:
            state: As for `load(into=state)`.

        Returns:
            The step, or None if there is none.

        Raises:
            AiofluxError: There are steps, and none of them can be loaded.
        """
        try:
            self.load(into=state)
        except CheckpointNotFoundError:
            if ray.train.get_checkpoint() is not None or self.steps():
                raise
            return None
        step = self.loaded_step
        assert step is not None
        if step > max(self._reported):
            for unknown, metrics in self._on_coordinator(lambda: self._unreported_until(step)):
                checkpoint = self._checkpoint(unknown)
                mode = CheckpointUploadMode.NO_UPLOAD
                ray.train.report(metrics, checkpoint, checkpoint_upload_mode=mode)
                self._reported.add(unknown)
        return step

    def should_save(self, step: int) -> bool:
        """Return whether to save after a step: by the schedule, or because of a preemption.

        It is True once for each node whose preemption Ray announces.
        """
        is_scheduled = super().should_save(step)
        info = None if step % self._preemption_every else ray.train.get_preemption_info()
        if info is None or self._preempted_nodes.issuperset(info.preempted_node_ids):
            return is_scheduled
        self._preempted_nodes.update(info.preempted_node_ids)
        unknown = time.time() + _UNKNOWN_DEADLINE_SECONDS
        self._deadline = info.deadline_ms / 1000 if info.deadline_ms else unknown
        return True

    def report(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    ) -> SaveHandle:
        """Save a state, and report the step and its metrics to Ray when the step is committed.

        After `should_save` has returned True because of a preemption, the call returns after the
        commit. If the rate of earlier saves is too low to save the whole state before the deadline,
        only the weights are saved, below `weights_uri`. `restore` does not load them.

        Args:
            step: As for `save_async`. A step that was reported before is saved again, but reported
                without a checkpoint.
            state: As for `save_async`.
            metrics: As for `ray.train.report`.
            checkpoint_upload_mode: ASYNC returns when the state is copied; SYNC after the commit.

        Raises:
            AiofluxError: As for `save_async`.
            ValueError: `checkpoint_upload_mode` is neither ASYNC nor SYNC; or no step was restored,
                and an earlier run with the same name and storage has reported this step or a later
                one.
        """
        if checkpoint_upload_mode not in _UPLOAD_MODES:
            raise ValueError(
                "checkpoint_upload_mode must be CheckpointUploadMode.ASYNC or SYNC, because a step "
                f"is committed after its upload, not {checkpoint_upload_mode!r}"
            )
        if self.loaded_step is None and step <= self._step_at_start:
            raise ValueError(
                f"Ray has the step {self._step_at_start} of this run, and no step was restored: "
                "call restore before the first step, or choose another RunConfig(name=...)"
            )
        is_new = step not in self._reported and (
            step > self._step_at_start or step not in self._on_coordinator(self.steps)
        )  # an earlier attempt has reported the committed steps up to its last one
        reported = dict(metrics or {})
        numbers = {name: float(each) for name, each in reported.items() if isinstance(each, Real)}
        deadline, self._deadline = self._deadline, None
        if deadline is None:
            handle = self.save_async(step, state, numbers)
        else:
            checkpoint_upload_mode = CheckpointUploadMode.SYNC
            values = state.state_dict() if hasattr(state, "state_dict") else state
            weights = {name: values[name] for name in self._weights_names if name in values}
            if weights and not self._on_coordinator(lambda: self._fits_before(deadline)):
                handle = self._save_weights(step, weights)
                ray.train.report(reported)
                return handle
            with self._lock.current:
                handle = self._save(step, state, numbers, is_urgent=True)
        checkpoint = None
        if is_new:
            checkpoint = self._checkpoint(step)
            self._reported.add(step)
        is_sync = checkpoint_upload_mode is CheckpointUploadMode.SYNC
        if self._is_local_mode or (checkpoint is None and is_sync):
            handle.result()  # because Ray does not call `wait_for_commit`

        def wait_for_commit(checkpoint: Checkpoint, name: str) -> Checkpoint:
            handle.result()
            return checkpoint

        ray.train.report(
            reported,
            checkpoint,
            checkpoint_upload_mode=checkpoint_upload_mode,
            checkpoint_upload_fn=wait_for_commit,
            delete_local_checkpoint_after_upload=False,  # it is the checkpoint in the bucket
        )
        return handle

    def close(self) -> None:
        """Wait for all saves, and release memory and connections, as `Checkpointer.close`."""
        try:
            if self._weights is not None:
                self._weights.close()
        finally:
            super().close()

    def _checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(path_of(join_uri(self.uri, step_prefix(step))), self._filesystem)

    def _unreported_until(self, last: int) -> list[tuple[int, dict[str, float]]]:
        """Return the committed steps that Ray does not know, up to `last`, and their metrics."""
        found = []
        for step in self.steps():
            if max(self._reported) < step <= last:
                commit = _bridge.run(read_commit(self._store, step_prefix(step))).commit
                found.append((step, dict(commit.metrics) if commit is not None else {}))
        return found

    def _fits_before(self, deadline: float) -> bool:
        """Return whether a save of the whole state should end before a time; True if unknown."""
        try:
            expected = expected_seconds(self.history())
        except AiofluxError as exc:
            _log.warning("%s: the rate of earlier saves is unknown: %s", self.uri, exc)
            return True
        left = deadline - time.time()
        fits = expected is None or expected <= left
        if not fits:
            _log.warning(
                "%s: only the weights are saved, to %s: a node is taken away in %.1f s, and a "
                "whole save takes %.1f s",
                self.uri,
                self.weights_uri,
                left,
                expected,
            )
        return fits

    def _save_weights(self, step: int, weights: dict[str, Any]) -> SaveHandle:
        if self._weights is None:
            self._weights = Checkpointer(self.weights_uri, keep_last=1, **self._weights_options)
        handle = self._weights.save_async(step, weights)
        handle.result()
        return handle

    def _on_coordinator(self, call: Callable[[], T]) -> T:
        with self._lock.current:
            return self._ranks.on_coordinator(call)


def expected_seconds(records: Sequence[SaveRecord]) -> float | None:
    """Return the expected seconds of a save as large as the last one; None if no save is known.

    The expected rate is that of the slowest of the newest saves, from the start of staging to the
    commit.
    """
    saves = [each for each in records if each.outcome == "committed" and each.num_bytes]
    saves = saves[-_NUM_MEASURED:]
    if not saves:
        return None
    seconds_per_byte = max(
        (each.staged_seconds + each.upload_seconds) / each.num_bytes for each in saves
    )
    return saves[-1].num_bytes * seconds_per_byte


def _step_of(checkpoint: Checkpoint) -> int:
    """Return the step of a reported checkpoint; -1 if no Checkpointer wrote it."""
    step = parse_step(checkpoint.path.rstrip("/").rpartition("/")[2] + "/")
    return -1 if step is None else step

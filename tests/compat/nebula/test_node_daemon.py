"""The node daemon: settings, requests, replaced stores, credentials, failures, and retries."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import pickle
import socket
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.checkpoint._save.process_uploader import Inbox
from aioflux.compat import nebula as nm
from aioflux.compat.nebula import _training_run
from aioflux.compat.nebula._memory_tier import GROWING, MemoryTier, Version
from aioflux.compat.nebula._node_daemon import NodeDaemon, TrainerConnection
from aioflux.compat.nebula._node_daemon_process import accept_trainers
from aioflux.compat.nebula._settings import Settings, parse_settings, socket_path
from aioflux.compat.nebula._storage_tier import StorageTier
from aioflux.errors import CheckpointError, TransientError
from tests.compat.nebula.test_nebula import commit, is_state_of, latest, state_of
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class FakeStore:
    """A store that can only be closed."""

    uri = "memory://fake"

    def __init__(self, name: str, on_close: Callable[[], None] = lambda: None) -> None:
        self.name, self.is_closed, self._on_close = name, False, on_close

    def __reduce__(self) -> Any:
        return FakeStore, (self.name,)

    async def aclose(self) -> None:
        self.is_closed = True
        self._on_close()


@pytest.fixture
def trainer() -> Iterator[TrainerConnection]:
    with socket.socket() as sock:
        yield TrainerConnection(1, sock)


def put(daemon: NodeDaemon, tag: str, name: str = "x") -> Version:
    """Complete a version of one part, or add the part to the version before."""
    daemon.memory.budget_bytes = 1000
    segment = daemon.memory.allocate(1, 10).segment
    assert segment is not None
    version = daemon.memory.add_part(1, segment.number, (tag, name, 10), GROWING, 0.1)
    daemon.memory.complete(version, f"{tag}-{name}")
    return version


async def hello(
    daemon: NodeDaemon,
    trainer: TrainerConnection,
    variables: dict[str, str] | None = None,
    **stores: Any,
) -> None:
    answer = await daemon.handle(trainer, ("hello", Settings(**stores), variables))
    assert answer == ("ok", None)


async def test_flush_raises_an_unexpected_failure_and_the_next_version_is_saved(
    trainer: TrainerConnection,
) -> None:
    async def save(tier: StorageTier, store: object, version: Version, *_: Any, **__: Any) -> None:
        if version.tag == "a":
            raise RuntimeError("no token")

    daemon = NodeDaemon(save=save)
    await hello(daemon, trainer, store=FakeStore("s"))
    put(daemon, "a")
    kind, error = await daemon.handle(trainer, ("flush", "a"))
    assert (kind, "RuntimeError: no token" in str(error)) == ("error", True)
    put(daemon, "b")
    assert await daemon.handle(trainer, ("flush", "b")) == ("ok", None)
    await daemon.close()


async def test_flush_waits_for_the_newer_version_of_its_tag(trainer: TrainerConnection) -> None:
    """Another process adds a part meanwhile."""
    daemon = NodeDaemon()
    daemon.tiers.append(StorageTier("storage", FakeStore("s"), 1000.0))  # type: ignore[arg-type]
    put(daemon, "a", "x")
    flush = asyncio.create_task(daemon.handle(trainer, ("flush", "a")))
    await asyncio.sleep(0)
    put(daemon, "a", "y")
    daemon.notify()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not flush.done()
    (version,) = daemon.memory.versions
    assert version.must_save
    assert set(version.parts) == {"x", "y"}
    daemon.memory.set_saved(version, "storage")
    daemon.notify()
    assert await flush == ("ok", None)


@pytest.mark.parametrize(
    ("uri", "variable"),
    [
        ("gs://bucket/run", "STORAGE_EMULATOR_HOST"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL_S3"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL"),
        ("az://account/container/run", ""),
    ],
)
def test_equal_uris_on_two_servers_have_two_daemons(
    uri: str, variable: str, tmp_path: Path
) -> None:
    """Otherwise the daemon of one would save to the other."""

    def paths(environ: dict[str, str], **options: str) -> tuple[str, str]:
        given = {"persistent_storage_path": uri, "local_storage_path": tmp_path}
        settings = parse_settings(given, options, environ)  # type: ignore[arg-type]
        assert b"eA==" not in pickle.dumps(settings)  # the daemon reads credentials by itself
        assert settings.local is not None
        node = {"AIOFLUX_NEBULA_DIR": str(tmp_path / "node")}
        return socket_path(settings.identity, node), settings.local.uri

    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    found = [paths({}, endpoint_url=url) for url in urls]
    assert found[0] == paths({}, endpoint_url=urls[0])
    connections = [
        f"AccountName=account;AccountKey=eA==;BlobEndpoint={url}/account" for url in urls
    ]
    if variable:
        assert found == [paths({variable: url}) for url in urls]
    else:
        found += [paths({"AZURE_STORAGE_CONNECTION_STRING": text}) for text in connections]
    found.append(paths({}))
    for number in range(2):
        assert len({each[number] for each in found}) == len(found)


async def test_a_new_trainer_replaces_a_store_that_differs(trainer: TrainerConnection) -> None:
    """Its options may have made the earlier saves fail."""
    daemon = NodeDaemon()
    stores = [FakeStore("one attempt"), FakeStore("one attempt"), FakeStore("two attempts")]
    for store in stores:
        await hello(daemon, trainer, store=store)
    (tier,) = daemon.tiers
    assert tier.store is stores[2]  # type: ignore[comparison-overlap]
    assert stores[0].is_closed
    await daemon.close()


async def test_a_replaced_store_is_closed_when_its_save_has_ended(
    trainer: TrainerConnection,
) -> None:
    saving, may_end, used = asyncio.Event(), asyncio.Event(), []

    async def save(tier: StorageTier, store: FakeStore, *_: Any, **__: Any) -> None:
        saving.set()
        await may_end.wait()
        used.append((store.name, store.is_closed))

    daemon = NodeDaemon(save=save)
    first, second, third = (FakeStore(name) for name in "abc")
    await hello(daemon, trainer, store=first)
    put(daemon, "a")
    daemon.notify()
    await saving.wait()
    await hello(daemon, trainer, store=second)
    await hello(daemon, trainer, store=third)
    assert (first.is_closed, second.is_closed, third.is_closed) == (False, True, False)
    may_end.set()
    while not first.is_closed:  # noqa: ASYNC110  there is no event
        await asyncio.sleep(0)
    assert used == [("a", False)]
    await daemon.close()
    assert third.is_closed


async def test_new_tiers_count_before_old_stores_are_closed(trainer: TrainerConnection) -> None:
    """Savers run meanwhile: a version that is saved to one tier must stay for the new one."""
    seen: list[int] = []
    daemon = NodeDaemon()
    await hello(
        daemon, trainer, store=FakeStore("old", lambda: seen.append(daemon.memory.num_tiers))
    )
    await hello(daemon, trainer, store=FakeStore("new"), local=FakeStore("disk"))
    assert seen == [2]
    await daemon.close()


def test_a_copy_that_failed_can_be_repeated(
    inside: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nm.init(inside, 1000, memory_buffer_size=1)
    checkpoint = nm.Checkpoint("a")
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(CheckpointError, match="NEBULA_MEMORY_BUFFER_SIZE"):
            checkpoint.save("model", state_of(1))
    checkpoint.save("model", state_of(1))
    assert is_state_of(1, checkpoint.load("model"))


async def test_a_new_trainer_brings_its_credentials(
    trainer: TrainerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon outlives the training that started it, and its credentials."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "expired")
    daemon, stores = NodeDaemon(), [FakeStore("s") for _ in range(3)]
    for secret, store in zip(("expired", "new", "new"), stores, strict=True):
        await hello(daemon, trainer, {"AWS_SECRET_ACCESS_KEY": secret}, store=store)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "new"
    assert "AWS_SESSION_TOKEN" not in os.environ
    assert [store.is_closed for store in stores] == [True, False, False]
    await daemon.close()


async def test_memory_that_cannot_be_mapped_is_freed(trainer: TrainerConnection) -> None:
    daemon = NodeDaemon()
    daemon.memory.budget_bytes = mmap.PAGESIZE
    for _ in range(2):
        kind, (how, number, _, _) = await daemon.handle(trainer, ("allocate", mmap.PAGESIZE))
        assert (kind, how) == ("ok", "new")
        trainer.inbox.fds = list(os.pipe())
        message = ("add_part", number, ("a", "x", 10), GROWING, 0.1)
        kind, error = await daemon.handle(trainer, message)
        assert kind == "error"
        assert isinstance(error, OSError)


async def test_a_connection_that_cannot_be_accepted_at_once_is_accepted_later(
    monkeypatch: pytest.MonkeyPatch, node: Path
) -> None:
    loop = asyncio.get_running_loop()
    failures = [OSError(errno.EMFILE, "too many open files")]
    accept = loop.sock_accept

    async def sock_accept(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    daemon, path = NodeDaemon(), str(node / "socket")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as ours:
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
        accepting = asyncio.create_task(accept_trainers(listening, daemon))
        await loop.run_in_executor(None, ours.connect, path)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not daemon.has_served:
                assert not accepting.done()
                await asyncio.sleep(0.02)
            ours.close()
            while not daemon.is_idle:
                await daemon.wait_for_change(1)
        accepting.cancel()


async def test_a_request_that_cannot_be_unpickled_is_an_error() -> None:
    """Such as a function of the script that runs."""
    ours, theirs = socket.socketpair()
    with ours:
        serving = asyncio.create_task(NodeDaemon().serve(theirs))
        unknown = b"cno_such_module\nname\n."
        ours.sendall(len(unknown).to_bytes(8, "big") + unknown)
        await serving
        ((kind, error),) = Inbox().feed(ours.recv(100_000))
    assert kind == "error"
    with pytest.raises(CheckpointError, match=r"No module named.*importable there"):
        raise error


def test_a_tag_that_is_saved_again_is_not_removed(inside: str) -> None:
    nm.init(inside, 0)
    client = _training_run.current().client
    commit("a", 1)
    commit("b", 2)
    nm.flush_persistence()
    client.call("remove", "a")
    for tag in ("a", "c"):
        nm.Checkpoint(tag, -2).save("model", f"again {tag}")
        client.call("commit", tag, "", True, 0, 1)
    nm.flush_persistence()
    found = nm.get_checkpoint("a")
    assert found is not None
    assert found.load("model") == "again a"


@pytest.mark.usefixtures("node")
def test_options_reach_the_store_of_the_settings() -> None:
    options: Any = {"retry": aioflux.RetryPolicy(max_attempts=2)}
    settings = parse_settings({"persistent_storage_path": "memory://options"}, options, {})
    assert settings.store is not None
    assert settings.store.retry.max_attempts == 2


async def save_until(daemon: NodeDaemon, tier: StorageTier, is_done: Callable[[], object]) -> None:
    saver = asyncio.create_task(daemon.run_saver(tier))
    async with asyncio.timeout(60):
        while not is_done():  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0)
    saver.cancel()
    await asyncio.wait([saver])


def storage() -> StorageTier:
    return StorageTier("storage", FakeStore("s"), 1000.0)  # type: ignore[arg-type]


async def test_a_failed_save_is_retried() -> None:
    num_failures, attempts = 3, []

    async def save(*_: Any, **__: Any) -> None:
        attempts.append(1)
        if len(attempts) <= num_failures:
            raise TransientError("the storage is not available")

    daemon = NodeDaemon(save=save, retry_seconds=0.0)
    version = put(daemon, "a")
    await save_until(daemon, storage(), lambda: version.saved_in)
    assert len(attempts) == num_failures + 1


@pytest.mark.parametrize(
    ("alone_seconds", "num_nodes", "is_stopping", "is_retried"),
    [
        (0, 1, False, True),
        (900, 1, False, True),
        (1100, 1, False, False),  # no trainer came back
        (0, 1, True, False),
        (0, 2, False, False),  # the other node would have to retry, too
    ],
)
def test_how_long_a_save_is_retried(
    alone_seconds: float, num_nodes: int, is_stopping: bool, is_retried: bool
) -> None:
    memory, tier = MemoryTier(1000), storage()
    version = Version("a", 1, "id", num_nodes=num_nodes)
    memory.versions.append(version)

    def retried(now: float) -> Version | None:
        return tier.version_to_retry(
            memory,
            now,
            alone_seconds=alone_seconds,
            linger_seconds=1000.0,
            is_stopping=is_stopping,
        )

    assert retried(7.0) is None  # it was not saved yet
    memory.set_saved(version, "storage", "why")
    assert retried(7.0) is None  # the pause is not over
    tier.retry_at = 7.0
    assert retried(7.0) is (version if is_retried else None)


async def test_the_newest_is_retried_after_an_older_one_was_saved() -> None:
    attempts: list[str] = []

    async def save(tier: StorageTier, store: object, version: Version, *_: Any, **__: Any) -> None:
        attempts.append(version.tag)
        if attempts == ["new"]:
            old.must_save = True  # as a flush of it does
            raise TransientError("the storage is not available")

    daemon = NodeDaemon(save=save, retry_seconds=0.0)
    old, new = put(daemon, "old"), put(daemon, "new")
    await save_until(daemon, storage(), lambda: new.saved_in)
    assert attempts == ["new", "old", "new"]


def test_settings_that_are_not_given_are_of_the_environment(tmp_path: Path) -> None:
    environ = {
        "NEBULA_PERSISTENT_STORAGE_PATH": "memory://bucket/run",
        "NEBULA_PERSISTENT_TIME_INTERVAL": "7",
        "NEBULA_MEMORY_BUFFER_SIZE": "200000000",
        "NEBULA_LOCAL_STORAGE_PATH": str(tmp_path),
    }
    settings = parse_settings({}, {}, environ)
    assert settings.uri == "memory://bucket/run"
    assert settings.interval_seconds == 7
    assert settings.budget_bytes == 200_000_000
    assert settings.local is not None
    assert settings.local.uri.startswith(f"file://{tmp_path}")


def test_memory_that_was_damaged_gives_way_to_the_storage(inside: str) -> None:
    nm.init(inside, 0)
    commit("a", 1)
    nm.flush_persistence()
    arena = next(iter(_training_run.current().snapshot_writer._arenas.values()))
    arena.view[arena.size // 2] ^= 1
    found = latest()
    assert found._saved_tag is not None
    assert [each.tier for each in found._saved_tag.sources] == ["memory", "storage"]
    assert is_state_of(1, found.load("model"))

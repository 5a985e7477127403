"""The process that keeps checkpoints: what happens to it, and what it does not let happen."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.checkpoint._save.state_pickle import StatePickle
from aioflux.checkpoint._save.uploader_messages import Inbox
from aioflux.compat import nebula as nm
from aioflux.compat.nebula import _node_daemon, _node_daemon_process, _run, _snapshot
from aioflux.compat.nebula._memory_tier import GROWING
from aioflux.compat.nebula._node_daemon import Keeper, _Place
from aioflux.compat.nebula._persist import NebulaSave
from aioflux.compat.nebula._settings import meeting_path, settings_of
from aioflux.compat.nebula._trainer import Trainer
from aioflux.errors import CheckpointError
from tests.compat.nebula.test_nebula import commit, is_state_of, state_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_save_that_fails_unexpectedly_is_told_and_the_next_one_is_saved(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: NebulaSave) -> None:
        raise RuntimeError("no token")

    nm.init(inside, 0)
    with monkeypatch.context() as patched:
        patched.setattr(NebulaSave, "run", run)
        commit("a", 1)
        with pytest.raises(CheckpointError, match="RuntimeError: no token"):
            nm.flush_persistence()
    commit("b", 2)
    nm.flush_persistence()
    assert "storage" in nm.list_checkpoints()["b"]["places"]


async def test_a_flush_waits_for_the_newer_one_of_its_tag_where_it_was_replaced() -> None:
    """Another process adds a part meanwhile."""
    keeper = Keeper()
    keeper.shelf.budget_bytes = 1000

    def put(name: str) -> None:
        piece = keeper.shelf.ask(1, 10).piece
        assert piece is not None
        version = keeper.shelf.put(1, piece.number, ("a", name, 10), GROWING, 0.1)
        keeper.shelf.close(version, name)

    async with aioflux.open_store("memory://a-flush-waits") as store:
        trainer = Trainer(1, socket.socket())
        keeper._places.append(_Place("storage", store, 1000.0))
        put("x")
        flush = asyncio.create_task(keeper._do_flush(trainer, [], "a"))
        await asyncio.sleep(0)
        put("y")
        keeper._notify()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not flush.done()
        (version,) = keeper.shelf.versions
        assert version.is_due
        assert set(version.parts) == {"x", "y"}
        keeper.shelf.saved(version, "storage")
        keeper._notify()
        await flush
        trainer.sock.close()


@pytest.mark.parametrize(
    ("uri", "variable"),
    [
        ("gs://bucket/run", "STORAGE_EMULATOR_HOST"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL_S3"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL"),
        ("az://account/container/run", ""),
    ],
)
def test_equal_uris_of_two_servers_are_two_places(uri: str, variable: str, tmp_path: Path) -> None:
    """Else one would be saved by the keeper of the other, and to the other server."""

    def place(environ: dict[str, str], **options: str) -> tuple[str, str]:
        given = {"persistent_storage_path": uri, "local_storage_path": tmp_path}
        settings = settings_of(given, options, environ)  # type: ignore[arg-type]
        assert settings.local is not None
        return meeting_path(settings.place, {"AIOFLUX_NEBULA_DIR": str(node)}), settings.local.uri

    node = tmp_path / "node"
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    told = [place({}, endpoint_url=url) for url in urls]
    assert told[0] == place({}, endpoint_url=urls[0])
    connections = [
        f"AccountName=account;AccountKey=eA==;BlobEndpoint={url}/account" for url in urls
    ]
    if variable:
        assert told == [place({variable: url}) for url in urls]
    else:
        told += [place({"AZURE_STORAGE_CONNECTION_STRING": text}) for text in connections]
    told.append(place({}))
    for number in range(2):
        assert len({each[number] for each in told}) == len(told)


async def test_who_comes_later_brings_the_options_that_count() -> None:
    """Those of the one before may be what made its saves fail."""
    keeper = Keeper()
    for attempts in (1, 1, 2):
        options: Any = {"retry": aioflux.RetryPolicy(max_attempts=attempts)}
        given = {"persistent_storage_path": "memory://who-comes-later"}
        trainer = Trainer(1, socket.socket())
        await keeper._do_hello(trainer, [], settings_of(given, options, {}))
        trainer.sock.close()
    (place,) = keeper._places
    assert place.store.retry.max_attempts == 2
    assert not keeper._unused
    await keeper.close()


async def test_a_store_that_was_replaced_is_closed_when_its_save_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving, may_end, used = asyncio.Event(), asyncio.Event(), []

    async def save(self: Keeper, place: _Place, store: aioflux.Store, version: Any) -> None:
        saving.set()
        await may_end.wait()
        used.append((store, store._closed))

    async def say_hello(attempts: int) -> aioflux.Store:
        options: Any = {"retry": aioflux.RetryPolicy(max_attempts=attempts)}
        given = {"persistent_storage_path": "memory://who-replaces"}
        await keeper._do_hello(trainer, [], settings_of(given, options, {}))
        return keeper._places[0].store

    monkeypatch.setattr(Keeper, "_save", save)
    keeper, trainer = Keeper(), Trainer(1, socket.socket())
    first = await say_hello(1)
    piece = keeper.shelf.ask(1, 10).piece
    assert piece is not None
    keeper.shelf.close(keeper.shelf.put(1, piece.number, ("a", "x", 10), GROWING, 0.1), "x")
    keeper._notify()
    await saving.wait()
    second, third = await say_hello(2), await say_hello(3)
    assert (first._closed, second._closed, third._closed) == (False, True, False)
    may_end.set()
    while not first._closed:  # noqa: ASYNC110  nothing tells of it
        await asyncio.sleep(0)
    assert used == [(first, False)]
    assert not keeper._unused
    trainer.sock.close()
    await keeper.close()
    assert third._closed


async def test_what_a_trainer_brings_counts_before_old_stores_are_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Savers go on meanwhile: what one has saved is to stay for the other, which is new."""
    aclose, seen = aioflux.Store.aclose, []

    async def look(self: aioflux.Store) -> None:
        seen.append(keeper.shelf.num_places)
        await aclose(self)

    monkeypatch.setattr(aioflux.Store, "aclose", look)
    keeper, trainer = Keeper(), Trainer(1, socket.socket())
    given = {"persistent_storage_path": "memory://what-counts"}
    await keeper._do_hello(trainer, [], settings_of(given, {}, {}))
    given["local_storage_path"] = str(tmp_path)
    options: Any = {"retry": aioflux.RetryPolicy(max_attempts=1)}
    await keeper._do_hello(trainer, [], settings_of(given, options, {}))
    assert seen == [2]
    trainer.sock.close()
    await keeper.close()


def test_a_copy_that_breaks_off_is_made_anew(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_to(self: StatePickle, target: memoryview) -> None:
        raise MemoryError("no room")

    nm.init(inside, 1000)
    checkpoint = nm.Checkpoint("a")
    with monkeypatch.context() as patched:
        patched.setattr(StatePickle, "copy_to", copy_to)
        with pytest.raises(MemoryError):
            checkpoint.save("model", state_of(1))
    checkpoint.save("model", state_of(1))
    assert is_state_of(1, checkpoint.load("model"))


async def test_who_comes_later_brings_the_credentials_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A keeper outlives the training that started it, and what that signed by."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ended")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "ended")
    keeper = Keeper()
    given = {"persistent_storage_path": "memory://who-signs"}
    for secret in ("ended", "new", "new"):
        trainer = Trainer(1, socket.socket())
        variables = {"AWS_SECRET_ACCESS_KEY": secret}
        await keeper._do_hello(trainer, [], settings_of(given, {}, {}), variables)
        trainer.sock.close()
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "new"
    assert "AWS_SESSION_TOKEN" not in os.environ
    assert not keeper._unused
    await keeper.close()


def test_memory_that_cannot_be_mapped_is_given_up(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError(errno.EMFILE, "too many open files")

    nm.init(inside, 1000, memory_buffer_size=300_000)
    checkpoint = nm.Checkpoint("a")
    with monkeypatch.context() as patched:
        patched.setattr(
            _node_daemon, "mmap", SimpleNamespace(mmap=cannot, PROT_READ=mmap.PROT_READ)
        )
        with pytest.raises(OSError, match="too many"):
            checkpoint.save("model", state_of(1))
    monkeypatch.delattr(_snapshot, "_DiskArena")  # there is room in memory
    checkpoint.save("model", state_of(2))
    assert is_state_of(2, checkpoint.load("model"))


async def test_a_trainer_that_cannot_be_heard_at_once_is_heard_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    failures = [OSError(errno.EMFILE, "too many open files")]
    accept = loop.sock_accept

    async def sock_accept(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    keeper = Keeper()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as ours:
        listening.setblocking(False)
        monkeypatch.setattr(_node_daemon_process, "_is_ours", bool)
        accepting = asyncio.create_task(_node_daemon_process._accept(listening, keeper))
        await loop.run_in_executor(None, ours.connect, listening.getsockname())
        while not keeper.has_served:
            assert not accepting.done()
            await asyncio.sleep(0.02)
        ours.close()
        while keeper.num_trainers:
            await keeper.changed(1)
        accepting.cancel()


async def test_what_cannot_be_read_is_told() -> None:
    """A function of the script that runs is none in another process."""
    ours, its = socket.socketpair()
    with ours:
        serving = asyncio.create_task(Keeper().serve(its))
        unknown = b"cno_such_module\nname\n."
        ours.sendall(len(unknown).to_bytes(8, "big") + unknown)
        await serving
        ((kind, error),) = Inbox().feed(ours.recv(100_000))
    assert kind == "error"
    with pytest.raises(CheckpointError, match=r"No module named.*importable there"):
        raise error


def test_what_is_saved_again_is_not_removed(inside: str) -> None:
    nm.init(inside, 0)
    client = _run.current().client
    commit("a", 1)
    commit("b", 2)
    nm.flush_persistence()
    client.call("remove", "a")
    for tag in ("a", "c"):  # both are saved, one behind the other
        nm.Checkpoint(tag, -2).save("model", f"again {tag}")
        client.call("commit", tag, "", True, 0, 1)
    nm.flush_persistence()
    found = nm.get_checkpoint("a")
    assert found is not None
    assert found.load("model") == "again a"

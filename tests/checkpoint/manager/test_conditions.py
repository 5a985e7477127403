"""Checkpoints on S3 servers that treat conditions in their own way: a step is saved, or refused."""

from __future__ import annotations

import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import aioflux
from aioflux import RetryPolicy, S3Access, UnsupportedError
from aioflux.checkpoint import Checkpointer
from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from tests.checkpoint.dcp.states import no_warnings, save
from tests.checkpoint.manager.trainer import is_state_of, state_of
from tests.checkpoint.manager.worker_process import Ranks
from tests.servers.process_state import forget_servers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.checkpoint.manager.worker_process import Forks
    from tests.servers.conditions import ConditionsGateway
    from tests.servers.moto import Moto

REFUSED = "can be loaded but not saved: .*require_conditions=False"
LOST = "both may report success"
IGNORED = "ignore:.* does not compare .* when it writes:RuntimeWarning"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, moto: Moto) -> None:
    forget_servers()
    moto.sign_in(monkeypatch)


@pytest.fixture
def uri() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}"


def keys(moto: Moto, uri: str) -> list[str]:
    prefix = uri.removeprefix("s3://bucket/")
    found = moto.door().list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/")
    return [each["Key"].removeprefix(f"{prefix}/") for each in found.get("Contents", [])]


# --- a server that refuses a correct ETag in quotes ----------------------------------------------


def test_a_step_is_saved_again(ceph_like_server: ConditionsGateway, moto: Moto, uri: str) -> None:
    with Checkpointer(uri, endpoint_url=ceph_like_server.url) as checkpointer:
        for value in range(3):
            checkpointer.save(4, state_of(value))
            assert is_state_of(value, checkpointer.load())
        assert checkpointer.steps() == [4]
    assert len([key for key in keys(moto, uri) if key.endswith(".distcp")]) == 1


@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
def test_dcp_saves_to_one_path_again(
    ceph_like_server: ConditionsGateway, uri: str, layout: Any
) -> None:
    for value in range(3):
        state = {"weight": torch.full((3,), float(value))}
        save(state, StorageWriter(uri, layout=layout, endpoint_url=ceph_like_server.url))
        into = {"weight": torch.zeros(3)}
        with no_warnings():
            dcp.load(into, storage_reader=StorageReader(uri, endpoint_url=ceph_like_server.url))
        assert torch.equal(into["weight"], state["weight"])


# --- a server that ignores conditions ------------------------------------------------------------


def test_a_checkpointer_says_at_once_that_saving_is_refused(
    ignoring_server: ConditionsGateway, moto: Moto, uri: str
) -> None:
    """What was saved elsewhere is loaded."""
    with Checkpointer(uri, endpoint_url=moto.url) as checkpointer:
        checkpointer.save(1, state_of(1))
    before = keys(moto, uri)
    with pytest.warns(RuntimeWarning, match=REFUSED) as caught:
        checkpointer = Checkpointer(uri, endpoint_url=ignoring_server.url)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert is_state_of(1, checkpointer.load())
    with pytest.raises(UnsupportedError, match=ignoring_server.url):
        checkpointer.save(2, state_of(2))
    checkpointer.close()
    assert keys(moto, uri) == before


def test_no_lost_one_of_concurrent_saves_of_a_step_succeeds(
    ignoring_server: ConditionsGateway, moto: Moto, uri: str
) -> None:
    """And nothing of them is left."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def run(value: int, checkpointer: Checkpointer) -> None:
        barrier.wait()
        try:
            checkpointer.save(1, state_of(value))
        except Exception as exc:
            failures.append(exc)

    with pytest.warns(RuntimeWarning, match=REFUSED):
        checkpointers = [Checkpointer(uri, endpoint_url=ignoring_server.url) for _ in range(4)]
    threads = [threading.Thread(target=run, args=each) for each in enumerate(checkpointers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(failure) for failure in failures] == [UnsupportedError] * 4
    assert keys(moto, uri) == []
    for checkpointer in checkpointers:
        checkpointer.close()


@pytest.mark.filterwarnings(IGNORED)
def test_a_single_writer_saves_where_it_is_allowed(
    ignoring_server: ConditionsGateway, moto: Moto, uri: str
) -> None:
    """The Checkpointer says what is lost."""
    options: dict[str, Any] = {
        "endpoint_url": ignoring_server.url,
        "credentials": S3Access(require_conditions=False),
    }
    with pytest.warns(RuntimeWarning, match=LOST):
        checkpointer = Checkpointer(uri, **options)
    with checkpointer:
        for value in range(2):
            checkpointer.save(1, state_of(value))
            assert is_state_of(value, checkpointer.load())
    assert len([key for key in keys(moto, uri) if key.endswith(".distcp")]) == 1
    save({"weight": torch.ones(3)}, StorageWriter(f"{uri}/dcp", **options))


def test_dcp_refuses_to_save(ignoring_server: ConditionsGateway, moto: Moto, uri: str) -> None:
    writer = StorageWriter(uri, endpoint_url=ignoring_server.url)
    with pytest.raises(CheckpointException) as failure:
        save({"weight": torch.ones(3)}, writer)
    [(error, _)] = failure.value.failures.values()
    assert isinstance(error, aioflux.CheckpointError)
    assert isinstance(error.__cause__, UnsupportedError)
    assert "require_conditions=False" in str(error)
    assert keys(moto, uri) == []


def test_every_rank_hears_that_saving_is_refused(
    ignoring_server: ConditionsGateway, moto: Moto, uri: str, forks: Forks, tmp_path: Path
) -> None:
    """None waits for another."""

    class Place:
        url = ignoring_server.url
        environment = {  # noqa: RUF012
            "AWS_ACCESS_KEY_ID": moto.access_key,
            "AWS_SECRET_ACCESS_KEY": moto.secret_key,
            "AWS_ENDPOINT_URL_S3": ignoring_server.url,
        }

    place: Any = Place()
    with Ranks(forks, place, 2, tmp_path) as ranks:
        ranks.call("open", uri=uri)
        results = ranks.send("save", step=1)
        ranks.send("close")
    assert [each[0] for each in results] == [False, False]
    assert "UnsupportedError" in str(results[0])
    assert "require_conditions=False" in str(results[1])
    assert keys(moto, uri) == []


# --- what is not known yet, and what need not be asked -------------------------------------------


def test_a_server_that_is_away_does_not_keep_a_checkpointer_from_being_built() -> None:
    """Nor do credentials that may not write: the first save tries again."""
    retry = RetryPolicy(max_attempts=1)
    with (
        Checkpointer("s3://bucket/run", endpoint_url="http://127.0.0.1:9", retry=retry) as away,
        pytest.raises(aioflux.TransientError),
    ):
        away.save(1, state_of(1))


def test_on_aws_nothing_is_sent(
    ceph_like_server: ConditionsGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for other stores."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("HTTPS_PROXY", ceph_like_server.url)
    num_requests = ceph_like_server.num_requests.total()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for uri in ("s3://bucket/run", "gs://bucket/run", "memory://run"):
            Checkpointer(uri).close()
    assert ceph_like_server.num_requests.total() == num_requests

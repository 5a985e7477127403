"""Settings of all tests, and fixtures with servers of other projects.

`HYPOTHESIS_PROFILE=nightly` runs more, random examples.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import coverage_lock
from tests.loops import body_threads, num_loops
from tests.servers import process_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integrations.lightning.fork_server import ForkServer
    from tests.servers.azurite import Azurite
    from tests.servers.conditions import ConditionsGateway
    from tests.servers.moto import Moto
    from tests.servers.rclone import Rclone
    from tests.servers.seaweedfs import SeaweedFS

__all__ = ["body_threads", "coverage_lock", "num_loops"]

# A shell starts background jobs with SIGINT ignored. The processes that tests start would inherit
# that, and Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With `derandomize`, a test fails only after a change in the code. Busy machines stall, so there is
# no deadline and no check of slow generation.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once on each cloud that `@pytest.mark.clouds("gs", "s3", "az")` names.

    Without names, the test parametrizes `cloud` itself.
    """
    marker = metafunc.definition.get_closest_marker("clouds")
    if marker is not None and marker.args and "cloud" in metafunc.fixturenames:
        metafunc.parametrize("cloud", marker.args, indirect=True)


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection; a full collection would take 0.5 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """End a process that does not exit after its tests, and print the stack of each thread."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


SERVERS = {"azurite", "ceph_like_server", "ignoring_server", "moto", "rclone", "seaweedfs"}
"""Fixtures that start servers of other projects."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need a server of another project as `more`, for `make test-more`."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        cloud = callspec.params.get("cloud", "gs") if callspec is not None else "gs"
        if cloud != "gs" or SERVERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.more)


@pytest.fixture(scope="module", autouse=True)
def empty_memory() -> Iterator[None]:
    """Delete the objects of a module below `memory://`, which exist until the process exits."""
    yield
    process_state.forget_objects()


@pytest.fixture(scope="module", autouse=True)
def forget_servers() -> None:
    """Forget the results of S3 probes: another server may have used the same port."""
    process_state.forget_servers()


@pytest.fixture
def cloud(request: pytest.FixtureRequest) -> str:
    """Name of the cloud that a test runs on."""
    name: str = getattr(request, "param", "gs")
    return name


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    """An S3 server that checks signatures; started once, with the bucket `bucket`."""
    from tests.servers.seaweedfs import SeaweedFS

    with SeaweedFS() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    """An S3 server that accepts any keys; started once, with the bucket `bucket`."""
    from tests.servers.moto import Moto

    with Moto() as server:
        yield server


@pytest.fixture(scope="session")
def ignoring_server(moto: Moto) -> Iterator[ConditionsGateway]:
    """An S3 server that ignores preconditions of writes; with the bucket `bucket` of moto."""
    from tests.servers.conditions import ConditionsGateway

    with ConditionsGateway(moto.url, "ignores_conditions") as server:
        yield server


@pytest.fixture(scope="session")
def ceph_like_server(moto: Moto) -> Iterator[ConditionsGateway]:
    """An S3 server that rejects a correct `If-Match` in quotes; with moto's bucket `bucket`."""
    from tests.servers.conditions import ConditionsGateway

    with ConditionsGateway(moto.url, "quoted_if_match_fails") as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[Rclone]:
    """An S3 server on a directory, which checks signatures; with the bucket `bucket`."""
    from tests.servers.rclone import Rclone

    with Rclone() as server:
        yield server


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A process that forks others; started once, because importing Lightning takes seconds."""
    from tests.integrations.lightning.fork_server import ForkServer

    with ForkServer(tmp_path_factory.mktemp("fork_server")) as fork_server:
        yield fork_server


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """An Azure server that checks signatures; started once, with the container `container`."""
    from tests.servers.azurite import Azurite

    with Azurite() as server:
        yield server

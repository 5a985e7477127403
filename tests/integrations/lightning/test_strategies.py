"""FSDPStrategy and ModelParallelStrategy on two ranks without accelerators."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from aioflux.integrations.lightning import AiofluxCheckpointIO
from aioflux.testing import GCSServer
from tests.integrations.lightning.tiny import OF_LIGHTNING, fit
from tests.rendezvous import rendezvous_port

if TYPE_CHECKING:
    from tests.integrations.lightning.fork_server import ForkServer

# Two ranks train two dozen times before the first test, and wait for each other all the time.
pytestmark = [*OF_LIGHTNING, pytest.mark.timeout(900), pytest.mark.more]


KINDS = ("model-parallel", "fsdp")


class Ranks(NamedTuple):
    found: list[dict[str, dict[str, Any]]]
    """What each rank found, by kind of strategy."""
    keys: list[str]
    """What the bucket holds then."""


@pytest.fixture(scope="module")
def ranks(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    directory = tmp_path_factory.mktemp("ranks")
    log = directory / "log"
    with GCSServer(buckets=("bucket",)) as server, rendezvous_port() as port:
        plugin = AiofluxCheckpointIO(endpoint_url=server.url)
        whole, _ = fit(4, plugin, [], enable_checkpointing=False)
        whole.save_checkpoint("gs://bucket/whole.ckpt")
        server.faults.add("*insert*", status=403, key="run/*/refused/*/__1_0.distcp")
        ended = fork_server.run(
            "shard",
            "gs://bucket/run",
            str(directory),
            log=log,
            num_ranks=2,
            STORAGE_EMULATOR_HOST=server.url,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            NODE_RANK="0",
        )
        assert ended == [0, 0], log.read_text()[-20_000:]
        keys = server.keys("bucket")
    found = [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(2)]
    return Ranks(found, keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "what",
    [
        "resumed, is_background=False",
        "resumed, is_background=True",
        "stock loads ours",
        "ours loads stock's",
        "ours loads a whole one",
        "ours loads a whole one of ours",
    ],
)
def test_training_goes_on_as_if_it_had_not_been_broken_off(
    kind: str, what: str, ranks: Ranks
) -> None:
    if kind == "fsdp" and what == "ours loads a whole one of ours":
        pytest.skip("the whole state of FSDP1 crashes in torch without an accelerator")
    assert [each[kind][what] for each in ranks.found] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["foreground", "background"])
def test_what_one_rank_cannot_store_fails_on_all(kind: str, when: str, ranks: Ranks) -> None:
    """In the background, by the next save."""
    for each in ranks.found:
        assert f"gs://bucket/run/{kind}/refused" in each[kind][f"refused, {when}"]
        assert "rank 1" in each[kind][f"refused, {when}"]
        assert "__1_0.distcp" in each[kind][f"refused, {when}"]
    left = [key for key in ranks.keys if "/refused" in key or "/next" in key]
    assert {key.rpartition("/")[2] for key in left} <= {"__0_0.distcp"}  # for `aioflux clean`


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_fails_on_all_ranks(kind: str, ranks: Ranks) -> None:
    first, second = (each[kind]["nothing"] for each in ranks.found)
    assert f"there is no checkpoint gs://bucket/run/{kind}/nothing" in first
    assert "another rank" in second


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["foreground", "background"])
def test_a_run_leaves_two_checkpoints_and_nothing_of_older_ones(
    kind: str, when: str, ranks: Ranks
) -> None:
    """The last one is a copy on the service: both are of one save."""
    prefix = f"run/{kind}/{when}/"
    keys = [key.removeprefix(prefix) for key in ranks.keys if key.startswith(prefix)]
    last = [key.removeprefix("last.ckpt/") for key in keys if key.startswith("last.ckpt/")]
    other = [key.partition("/")[2] for key in keys if not key.startswith("last.ckpt/")]
    assert last == other
    assert last[0] == ".metadata"
    assert last[-1] == "meta.pt"
    assert [key.partition("/")[2] for key in last[1:-1]] == ["__0_0.distcp", "__1_0.distcp"]

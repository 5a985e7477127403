"""Contenders of the scenario of distributed checkpoints: each loads what it saved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from perf.scenarios import SCENARIOS
from perf.servers import open_server
from perf.work import OperationResult, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.servers import Server

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.more]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    (match, *_) = SCENARIOS["dcp-load-1"].matches()
    with open_server(match.ours.server) as server:
        yield server


@pytest.mark.parametrize("name", ["dcp-save-1", "dcp-load-1"])
def test_every_contender_moves_all_bytes(name: str, server: Server) -> None:
    for match in SCENARIOS[name].toy().matches():
        for turn in (match.ours, match.theirs):
            told = measure(replace(turn.work, url=server.url, size_bytes=1 << 20))
            assert told["num_bytes"] == 1 << 20


def test_ours_reports_what_it_reads(server: Server) -> None:
    (match, *_) = SCENARIOS["dcp-load-1"].toy().matches()
    told = measure(replace(match.ours.work, url=server.url))
    assert 1.0 <= told["stored_bytes"] / told["num_bytes"] < 1.1
    assert OperationResult(1).stored_bytes == 0

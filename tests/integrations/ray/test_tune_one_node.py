"""Trials of Ray Tune on one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ray import tune

from aioflux.data import IterableDataset
from tests.integrations.ray.cluster import local_node

if TYPE_CHECKING:
    from pathlib import Path

    import aioflux
    from aioflux import sync
    from aioflux.testing import GCSServer

pytestmark = pytest.mark.more


def test_trials_of_a_node_share_one_listing_and_one_cache(
    server: GCSServer, bucket: sync.Store, tmp_path: Path
) -> None:
    """Each object is read once for all trials and epochs."""
    keys = [f"{number:02d}" for number in range(20)]
    bucket.put_many((f"in/{key}", key.encode()) for key in keys)
    before = server.stats.total.requests
    listing = bucket.list_all("in/")
    url, cache = server.url, str(tmp_path / "cache")

    def trial(config: dict[str, int], *, listing: aioflux.Listing) -> None:
        data = IterableDataset.from_keys(
            "gs://bucket",
            listing,
            shuffle=True,
            seed=config["seed"],
            cache=cache,
            endpoint_url=url,
        )
        for epoch in range(2):
            data.set_epoch(epoch)
            found = sorted(sample.data.decode() for sample in data)
        tune.report({"found": found, "hits": data.stats.num_cache_hits})

    with local_node():
        results = tune.Tuner(
            tune.with_parameters(trial, listing=listing),
            param_space={"seed": tune.grid_search([1, 2])},
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0),
        ).fit()
    assert not results.errors
    assert [each.metrics["found"] for each in results] == [keys, keys]
    assert sorted(each.metrics["hits"] for each in results) == [20, 40]
    assert server.stats.total.requests - before == 1 + 20

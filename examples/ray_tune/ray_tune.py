"""Try learning rates with Ray Tune; trials share one listing, and a cache on each node."""

from __future__ import annotations

import argparse
import tempfile
import uuid
from typing import Any

import ray
import torch
from ray import tune

import aioflux
from aioflux import sync
from aioflux.data import IterableDataset, Sample
from aioflux.integrations.ray import storage_filesystem
from aioflux.testing import GCSServer


def to_tensor(sample: Sample) -> torch.Tensor:
    """Return the bytes of an object as a tensor."""
    return torch.tensor(list(sample.data), dtype=torch.float32)


def trial(config: dict[str, float], *, listing: aioflux.Listing, **options: Any) -> None:
    """Train for two epochs on the listed objects."""
    data = IterableDataset.from_keys(
        keys=listing, transform=to_tensor, shuffle=True, tail="uneven", **options
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(2):
        data.set_epoch(epoch)
        for values in data:
            loss = (model(values) - 1.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tune.report({"loss": float(loss), "hits": data.stats.num_cache_hits})


def run(uri: str, cache: str, **options: str) -> None:
    """Write 32 objects to the bucket, list them once, and run four trials.

    Args:
        uri: Prefix in a bucket.
        cache: A local directory of each node.
        options: As for `open_store`.
    """
    with sync.open_store(f"{uri}/data", **options) as store:
        store.put_many((f"{number:02d}", bytes([number % 3] * 4)) for number in range(32))
        listing = store.list_all()
    shared: dict[str, Any] = {"listing": listing, "uri": f"{uri}/data", "cache": cache, **options}
    results = tune.Tuner(
        tune.with_parameters(trial, **shared),
        param_space={"lr": tune.grid_search([0.001, 0.01, 0.05, 0.1])},
        run_config=tune.RunConfig(
            name="run",
            storage_path=uri.partition("://")[2],
            storage_filesystem=storage_filesystem(uri, **options),
            verbose=0,
        ),
    ).fit()
    hits = sum(result.metrics["hits"] for result in results)
    print(f"{hits} of 256 objects from the cache")
    print(f"best: {results.get_best_result('loss', 'min').config}")


def main() -> None:
    """Run on the given bucket, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="prefix in a bucket; by default a server is started")
    uri = parser.parse_args().uri
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as cache:
        if uri is not None:
            run(f"{uri.rstrip('/')}/{uuid.uuid4().hex[:8]}", cache)
        else:
            with GCSServer(buckets=("bucket",)) as server:
                run("gs://bucket/tune", cache, endpoint_url=server.url)
    ray.shutdown()


if __name__ == "__main__":
    main()

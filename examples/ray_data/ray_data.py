"""Read records from a bucket with Ray Data, filter them, and write Parquet exactly once."""

from __future__ import annotations

import argparse
import json
import uuid
from typing import Any

import ray
import ray.data

from aioflux import sync
from aioflux.data import jsonl, parquet
from aioflux.integrations.ray import read_objects, write_objects
from aioflux.testing import GCSServer


def run(uri: str, endpoint_url: str | None = None) -> None:
    """Write records to the bucket, read the even ones, and write them as Parquet."""
    with sync.open_store(f"{uri}/in", endpoint_url=endpoint_url) as store:
        for shard in range(8):
            rows: Any = ({"id": shard * 100 + row, "even": row % 2 == 0} for row in range(100))
            store.put(f"{shard}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    dataset = read_objects(f"{uri}/in", records=jsonl(), endpoint_url=endpoint_url)
    even = dataset.filter(lambda row: row["even"])
    manifest = write_objects(even, f"{uri}/out", endpoint_url=endpoint_url)
    back = read_objects(f"{uri}/out", records=parquet(), endpoint_url=endpoint_url)
    print(f"committed {back.count()} rows by {manifest.uri}")


def main() -> None:
    """Run on the given bucket, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="prefix in a bucket; by default a server is started")
    uri = parser.parse_args().uri
    ray.init(include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    if uri is not None:
        run(f"{uri.rstrip('/')}/{uuid.uuid4().hex[:8]}")
    else:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket", server.url)
    ray.shutdown()


if __name__ == "__main__":
    main()

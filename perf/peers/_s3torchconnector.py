"""Options of s3torchconnector for the benchmark server, which needs path-style addressing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s3torchconnector import S3ClientConfig  # type: ignore[import-not-found, import-untyped]

from perf.access import REGION

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["client_config", "options"]


def client_config() -> Any:
    """Return the default configuration with path-style addressing."""
    return S3ClientConfig(force_path_style=True)


def options(work: Work) -> dict[str, Any]:
    """Return the constructor arguments of its classes."""
    return {"region": REGION, "endpoint": work.url, "s3client_config": client_config()}

"""What the adapters of s3torchconnector share: it speaks to an endpoint by paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s3torchconnector import S3ClientConfig  # type: ignore[import-not-found, import-untyped]

from perf.access import REGION

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["client_config", "options"]


def client_config() -> Any:
    """Return its defaults, but for the path."""
    return S3ClientConfig(force_path_style=True)


def options(work: Work) -> dict[str, Any]:
    """Return what its classes are opened with."""
    return {"region": REGION, "endpoint": work.url, "s3client_config": client_config()}

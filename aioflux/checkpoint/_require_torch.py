"""require_torch: an error that says what to install if PyTorch is missing."""

from __future__ import annotations

__all__ = ["require_torch"]


def require_torch(name: str) -> None:
    """Import torch.

    Args:
        name: The name that needs it, for the error.

    Raises:
        ModuleNotFoundError: torch is not installed; the message says how to install it.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{name} needs PyTorch: pip install 'aioflux[torch]'", name=exc.name
        ) from exc

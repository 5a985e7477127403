"""require_torch: an import of PyTorch whose error names the package to install."""

from __future__ import annotations


def require_torch(name: str) -> None:
    """Import torch.

    Args:
        name: Name of the function or class that needs torch, for the error.

    Raises:
        ModuleNotFoundError: torch is not installed; the message says how to install it.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        from aioflux._values.distribution import pip_install

        raise ModuleNotFoundError(
            f"{name} needs PyTorch: {pip_install('torch')}", name=exc.name
        ) from exc

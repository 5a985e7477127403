"""Gaussian tensors for measuring compression, similar to the tensors of a training run.

The other scenarios use random bytes, which cannot be compressed.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["KINDS", "num_bytes_of", "weights_of"]

KINDS = ("bf16", "fp32", "master", "adam_v")
"""Weights in bf16; weights in fp32; an fp32 master copy cast from bf16; Adam's second moment in
fp32."""
_SCALE = 0.02
"""Standard deviation of weights, about the one of an initialised transformer."""
_TENSOR_BYTES = 32 << 20
_SEED = 0


@lru_cache(maxsize=1)
def weights_of(kind: str, size_bytes: int) -> dict[str, torch.Tensor]:
    """Return a state whose tensors have `size_bytes` in all.

    Args:
        kind: One of `KINDS`.
        size_bytes: Size of all tensors.

    Raises:
        ValueError: The kind is unknown.
    """
    generator = torch.Generator().manual_seed(_SEED)
    state: dict[str, torch.Tensor] = {}
    for start in range(0, size_bytes, _TENSOR_BYTES):
        size = min(_TENSOR_BYTES, size_bytes - start)
        num_elements = size // (2 if kind == "bf16" else 4)
        weights = torch.randn(num_elements, generator=generator).mul_(_SCALE)
        state[f"layers.{len(state)}.weight"] = _of_kind(kind, weights)
    return state


def _of_kind(kind: str, weights: torch.Tensor) -> torch.Tensor:
    match kind:
        case "bf16":
            return weights.bfloat16()
        case "fp32":
            return weights
        case "master":
            return weights.bfloat16().float()
        case "adam_v":
            return weights.mul_(weights).mul_(1e-3)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")


def num_bytes_of(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())

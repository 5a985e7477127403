"""Tensors that are like those of a training run, where compression is measured: Gaussian numbers.

Random bytes, which all other scenarios move, would not become smaller.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["KINDS", "num_bytes_of", "weights_of"]

KINDS = ("bf16", "fp32", "master", "adam_v")
"""Weights in bf16 and in fp32; the fp32 master of weights in bf16, as it is after a cast; Adam's
second moment in fp32."""
_SCALE = 0.02
"""Standard deviation of weights, about that of transformers when they are initialised."""
_TENSOR_BYTES = 32 << 20
_SEED = 0


@lru_cache(maxsize=1)
def weights_of(kind: str, size_bytes: int) -> dict[str, torch.Tensor]:
    """Return a state of tensors that have so many bytes together, of one of `KINDS`.

    Raises:
        ValueError: There is no such kind.
    """
    generator = torch.Generator().manual_seed(_SEED)
    state: dict[str, torch.Tensor] = {}
    for start in range(0, size_bytes, _TENSOR_BYTES):
        size = min(_TENSOR_BYTES, size_bytes - start)
        num_elements = size // (2 if kind == "bf16" else 4)
        made = torch.randn(num_elements, generator=generator).mul_(_SCALE)
        state[f"layers.{len(state)}.weight"] = _of_kind(kind, made)
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
    raise ValueError(f"weights are of {', '.join(KINDS)}, not {kind!r}")


def num_bytes_of(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())

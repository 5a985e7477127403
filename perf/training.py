"""A small training loop on one thread, without data loading: linear layers of 512 x 512."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["train"]

_WIDTH = 512


def train(num_steps: int, after: Callable[[int], None]) -> None:
    """Run training steps of about 10 ms, and call `after` with the number of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(_WIDTH, _WIDTH)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        after(step)

"""Transforms that spawned workers can import."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.data import Sample


def key_of(sample: Sample) -> str:
    return sample.key


def text_of(sample: Sample) -> tuple[str, str]:
    return sample.key, sample.data.decode()


def refuse(sample: Sample) -> str:
    raise ArithmeticError("no such number")


def give_token() -> str:
    return "token"


def lines_of(sample: Sample) -> Iterator[str]:
    yield from sample.data.decode().splitlines()


def uri_of(sample: Sample) -> str:
    return sample.uri


def refuse_odd(sample: Sample) -> str:
    if int(sample.key) % 2:
        raise ArithmeticError("no such number")
    return sample.key


def dice_of(sample: Sample) -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))

"""Formats that spawned workers can import."""

from __future__ import annotations


def text_of(data: bytes) -> str:
    return data.decode()

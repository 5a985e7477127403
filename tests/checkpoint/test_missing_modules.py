"""Without torch or lightning, what needs them says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BLOCKED = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # importing it is a ModuleNotFoundError
try:
    {code}
except ModuleNotFoundError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("missing", "code", "says"),
    [
        (
            ["torch"],
            "from aioflux.checkpoint import load; load('gs://bucket/model.pt')",
            "aioflux.checkpoint.load needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint import save; save(1, 'gs://bucket/model.pt')",
            "aioflux.checkpoint.save needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint import Checkpointer",
            "aioflux.checkpoint.Checkpointer needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["torch"],
            "from aioflux.checkpoint.dcp import StorageReader",
            "aioflux.checkpoint.dcp needs PyTorch: pip install 'aioflux[torch]'",
        ),
        (
            ["lightning"],
            "import aioflux.integrations.lightning",
            "aioflux.integrations.lightning needs lightning: pip install 'aioflux[lightning]'",
        ),
        (
            ["lightning", "torch"],
            "from aioflux.integrations.lightning import ModelCheckpoint",
            "aioflux.integrations.lightning needs lightning: pip install 'aioflux[lightning]'",
        ),
    ],
    ids=["load", "save", "Checkpointer", "dcp", "lightning", "lightning-and-torch"],
)
def test_what_is_missing_is_told_with_how_to_install_it(
    missing: list[str], code: str, says: str
) -> None:
    script = _BLOCKED.format(missing=missing, code=code)
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240
    )
    assert told.stdout.strip() == says

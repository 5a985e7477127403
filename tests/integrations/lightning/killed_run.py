"""A run that is killed in the middle: `python -m tests.integrations.lightning.killed_run URI`."""

from __future__ import annotations

import os
import signal
import sys

from aioflux.integrations.lightning import AiofluxCheckpointIO, ModelCheckpoint
from tests.integrations.lightning.tiny import At, fit

if __name__ == "__main__":
    plugin = AiofluxCheckpointIO(background=True)
    saving = ModelCheckpoint(sys.argv[1], every_n_train_steps=2, save_last=True)
    kill = At(7, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    fit(12, plugin, [saving, kill])

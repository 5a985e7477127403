"""`aioflux ckpt`: the commands for checkpoints. PyTorch is not needed."""

from __future__ import annotations

import typer

from aioflux.cli._ckpt.history import history
from aioflux.cli._ckpt.inspect import list_command, show, verify_command
from aioflux.cli._ckpt.modify import copy_command, prune_command
from aioflux.cli._settings import with_common_options

ckpt = typer.Typer(
    name="ckpt",
    help="List, verify, prune and copy checkpoints.",
    epilog="Example: aioflux ckpt verify --deep gs://bucket/run",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
for _name, _command in (
    ("list", list_command),
    ("show", show),
    ("verify", verify_command),
    ("prune", prune_command),
    ("history", history),
    ("copy", copy_command),
):
    ckpt.command(_name)(with_common_options(_command))

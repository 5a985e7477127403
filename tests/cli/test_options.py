"""Each command and each of its options, in a process of its own, as a shell starts it."""

from __future__ import annotations

import asyncio
import gzip
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from aioflux import open_store
from tests.checkpoint.saves import save_step
from tests.cli.conftest import FAR_SECONDS, PROGRAM, write_files
from tests.cli.test_command_table import CELLS, NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Bucket

SCRIPTS = {
    "ls": """
        ls @/d                               -> @/d/a.json\n@/d/b.txt\n@/d/e/
        ls -r @/d                            -> @/d/e/c.json
        ls -l @/d                            -> 2 objects, 6 bytes
        ls -lh @/d                           -> 1 B
        ls --sort size --limit 1 @/d         -> @/d/b.txt
        ls --newer 1h @/d/b.txt              -> @/d/b.txt
        ls -r --all @                        -> @/.aioflux-uploads/x
        ls --json @/d/b.txt                  -> "size": 5
        ls --manifest @/m @/d                -> 3 objects
        ls --all-generations file:///tmp     -> [1] only gs:// and s3://
        ls --sort no @                       -> [2] use key, time, size
    """,
    "cp": """
        cp @/d/b.txt out.txt                 -> copied 1 object
        cp -n @/d/b.txt out.txt              -> 1 skipped
        cp -r --include *.json @/d copy      -> copied 2 objects
        cp -r --exclude e @/d copy           -> copied 2 objects
        cp --dry-run @/d/b.txt x             -> would copy @/d/b.txt to x
        cp --content-type a/b --cache-control no-store --metadata k=v out.txt @/o -> copied 1
        cp --storage-class NEARLINE out.txt @/n -> copied 1
        stat @/o                             -> k: v
        stat @/n                             -> NEARLINE
    """,
    "mv": """
        mv --dry-run @/d/b.txt @/z           -> would move
        mv @/d/b.txt @/z                     -> moved 1 object
        mv -n @/d/a.json @/z                 -> 1 skipped
        mv -r --include *.json --exclude e @/d @/moved -> moved 1 object
        ls -r @/moved                        -> @/moved/a.json
    """,
    "sync": """
        sync @/d mirror                      -> copied 3 objects
        sync --dry-run mirror @/d            -> 3 unchanged
        sync --checksum mirror @/d           -> 3 unchanged
        sync --delete --exclude *.txt files @/d -> 2 deleted
        sync --include *.bin --content-type a/b --cache-control no-store files @/i -> copied 1
        sync --storage-class NEARLINE --metadata k=v files @/j -> copied 1
        sync --dry-run files @/none          -> [3] would copy
    """,
    "cat": """
        cat --range 1-3 @/d/b.txt            -> 22
        cat --decompress @/z.gz              -> unpacked
    """,
    "stat": """
        stat @/d/b.txt                       -> 5 (5 B)
        stat --json @/d/b.txt                -> "type": "object"
    """,
    "du": """
        du --depth 1 @/d                     -> @/d/e/
        du -h @/d                            -> 7 B
        du --json @/d                        -> "num_objects": 3
    """,
    "sign": """
        sign --expires 15m s3://bucket/a     -> X-Amz-Expires=900
        sign --method PUT --json s3://bucket/a -> "url"
    """,
    "rm": """
        rm -r --dry-run @/d                  -> would delete @/d/a.json
        rm -r -y --include *.json --exclude e @/d -> deleted 1 object
        rm @/d/b.txt                         -> deleted 1 object
    """,
    "clean": """
        clean --older-than 0s --dry-run @    -> .aioflux-uploads/x
        clean --older-than 0s --json @       -> .aioflux-uploads/x
    """,
    "doctor": """
        doctor --write @                     -> ok       delete
        doctor --json @                      -> "list"
    """,
    "ckpt list": """
        ckpt list @/run                      -> 3 steps
        ckpt list --json @/run               -> "step": 200
    """,
    "ckpt show": """
        ckpt show --step 200 @/run           -> 200
        ckpt show --json @/run               -> "step": 300
    """,
    "ckpt verify": """
        ckpt verify --step 200 @/run         -> 200
        ckpt verify --deep --json @/run      -> "step": 100
    """,
    "ckpt prune": """
        ckpt prune --keep-last 1 --keep-every 200 --protect 100 --dry-run @/run -> 0 steps
        ckpt prune --keep-best loss:min --ttl 1d --json @/run -> 2 kept
        ckpt list @/run                      -> 2 steps
    """,
    "ckpt history": """
        ckpt history --json @/run            -> [1] history
        ckpt history --csv @/run             -> [1] history
        ckpt history --plot @/run            -> [1] history
        ckpt history --picture x.svg @/run   -> [1] history
    """,
    "ckpt copy": """
        ckpt copy --step 200 @/run @/other   -> copied 1 checkpoint
        ckpt copy --overwrite @/run @/other  -> copied 2 checkpoints
    """,
    "serve": """
        serve --until-stdin-closes --port 0 --bucket one --root ROOT/served -> http://127.0.0.1:
    """,
    "": """
        --max-in-flight 2 --quiet cp @/d/b.txt q -> $
        -v --connect-deadline 9 cp @/d/b.txt q -> copied
        --log-level debug stat @/d/b.txt     -> aioflux.requests
        --endpoint-url http://127.0.0.1:1 --connect-deadline 0.1 ls @ -> [1] 127.0.0.1:1
        --anonymous ls @/d                   -> @/d/a.json
        --debug cat @/none                   -> [1] Traceback
        --version                            -> aioflux 0.
    """,
}
"""Command lines of each command, with a part of what they print, after their exit status if it is
not 0. `@` is a bucket and `$` means that nothing is printed."""
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_each_option_is_in_a_script(cell) -> None:
    name = NAMES[CELLS.index(cell)]
    used = set(_OPTION.findall(SCRIPTS[name]))
    assert set(re.findall(r"\[(--?[a-z-]+)", cell)) - {"-h"} <= used
    assert "-h" not in re.findall(r"\[(-[a-z])", cell) or used & {"-h", "-lh"}


@pytest.fixture
def filled(bucket: Bucket, tmp_path: Path) -> Bucket:
    """A bucket with some objects and a run, in a directory with files."""
    bucket.put("d/a.json", b"1")
    bucket.put("d/b.txt", b"12223")
    bucket.put("d/e/c.json", b"3")
    bucket.put("z.gz", gzip.compress(b"unpacked"))
    bucket.put(".aioflux-uploads/x", b"left")

    async def save() -> None:
        async with open_store(f"{bucket.uri}/run", endpoint_url=bucket.server.url) as store:
            for step, loss in ((100, 0.5), (200, 0.25), (300, 0.75)):
                await save_step(store, step, metrics={"loss": loss})

    asyncio.run(save())
    write_files(tmp_path / "files", {"new.bin": b"new"})
    return bucket


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_in_a_process(environment, filled, tmp_path, name) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1"}
    lines = SCRIPTS[name].replace("@", filled.uri).replace("ROOT", str(tmp_path))
    for line in re.findall(r"^ {8}(\S.*?) +-> (.*(?:\n\S.*)*)", lines, re.MULTILINE):
        words, expected = line
        status, text = re.fullmatch(r"(?:\[(\d)\] )?(.*)", expected, re.DOTALL).groups(default="0")
        ended = subprocess.run(
            [*PROGRAM, *shlex.split(words)],
            cwd=tmp_path,
            env=environment | keys,
            input="",
            capture_output=True,
            text=True,
            timeout=FAR_SECONDS,
            check=False,
        )
        printed = ended.stdout + ended.stderr
        assert ended.returncode == int(status), (words, printed)
        assert text in printed if text != "$" else not printed, (words, printed)

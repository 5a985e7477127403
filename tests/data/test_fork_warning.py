"""Workers of a dataset print no more about forks than those of any PyTorch process with a thread.

Python 3.12 and later issue a DeprecationWarning for a fork beside threads, and show it only on
request.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.bridge.scripts import LIMIT_SECONDS, ROOT

if TYPE_CHECKING:
    from tests.data.conftest import Bucket

SCRIPT = """
import sys, threading
from torch.utils.data import DataLoader
if sys.argv[1] == "aioflux":
    from aioflux.data import MapDataset
    dataset = MapDataset("gs://bucket/train", endpoint_url=sys.argv[2])
else:
    dataset = list(range(8))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for _ in range(2):
    assert sum(len(batch) for batch in DataLoader(dataset, 4, num_workers=2, collate_fn=list)) == 8
"""


def printed(bucket: Bucket, dataset: str, *options: str) -> str:
    """Return the standard error of a script with a DataLoader, without the process id."""
    ended = subprocess.run(
        [sys.executable, *options, "-c", SCRIPT, dataset, bucket.server.url],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
        cwd=ROOT,
    )
    return re.sub(r"pid=\d+", "pid", ended.stderr)


def test_nothing_is_printed_by_default(bucket: Bucket) -> None:
    bucket.fill(8)
    assert printed(bucket, "aioflux") == ""


def test_on_request_the_line_is_that_of_any_process_with_a_thread(bucket: Bucket) -> None:
    bucket.fill(8)
    option = "-Wdefault:This process:DeprecationWarning"
    assert printed(bucket, "aioflux", option) == printed(bucket, "plain", option)

"""wrk, a load generator in C: an upper bound for reads. It discards bodies and trusts any server.

wrk runs for a fixed time instead of a number of requests. The result is the bytes of all completed
requests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perf.work import Work

_REQUEST_SECONDS = 20e-6
_BYTES_PER_SECOND = 4e9
"""Rough cost of a request and of its bytes, to compute the duration of a run."""
_COMPLETED = re.compile(r"(\d+) requests in ([\d.]+)(ms|s|m),")
_ERRORS = re.compile(r"Socket errors: .*|Non-2xx.*")
_SCRIPT = """\
local requests, count = {{}}, 0
function init()
    for index = 0, {keys} - 1 do
        requests[index] = wrk.format("GET", string.format("/{bucket}/{size}/%d", index))
    end
end
function request()
    count = count + 1
    return requests[count % {keys}]
end
"""


async def get_many(work: Work) -> int:
    """Read keys for the time of about `num_objects` reads, and return the bytes received.

    Raises:
        RuntimeError: wrk is not installed, or failed.
    """
    if shutil.which("wrk") is None:
        raise RuntimeError("wrk is not installed: apt install wrk")
    each = _REQUEST_SECONDS + work.size_bytes / _BYTES_PER_SECOND
    seconds = max(1, round(work.num_objects * each))
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_SCRIPT.format(keys=work.num_keys, bucket=work.bucket, size=work.size_bytes))
        script.flush()
        command = ["wrk", "-t1", f"-c{work.in_flight}", f"-d{seconds}s", "--timeout", "60"]
        done = subprocess.run(  # noqa: S603, ASYNC221  nothing else runs on this loop
            [*command, "-s", script.name, work.url],
            capture_output=True,
            text=True,
            check=True,
        )
    return completed(done.stdout) * work.size_bytes


def completed(output: str) -> int:
    """Return the number of completed requests, from the output of wrk.

    Raises:
        RuntimeError: Some requests failed, or the output has no number.
    """
    found, errors = _COMPLETED.search(output), _ERRORS.findall(output)
    if found is None or errors:
        raise RuntimeError(f"wrk failed: {' '.join(errors) or output}")
    return int(found[1])

"""wrk, a load generator in C: the ceiling for reads. It drops the bytes and checks no certificate.

It works for a time, not for so many requests, and so returns the bytes of as many as it did.
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
"""About what a request and its bytes take: that decides how long it works."""
_COMPLETED = re.compile(r"(\d+) requests in ([\d.]+)(ms|s|m),")
_TROUBLE = re.compile(r"Socket errors: .*|Non-2xx.*")
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
    """Read keys for about as long as `num_objects` take, and return the bytes of all that came.

    Raises:
        RuntimeError: wrk is not installed, or has failed.
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


def completed(told: str) -> int:
    """Return how many requests wrk says that it did.

    Raises:
        RuntimeError: Some failed, or it does not say.
    """
    found, trouble = _COMPLETED.search(told), _TROUBLE.findall(told)
    if found is None or trouble:
        raise RuntimeError(f"wrk failed: {' '.join(trouble) or told}")
    return int(found[1])

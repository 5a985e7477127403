"""Machine, versions and commit of a run."""

from __future__ import annotations

import os
import platform
import re
import shutil
import ssl
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aioflux

__all__ = ["PACKAGES", "describe", "summary"]

PACKAGES = (
    "uvloop",
    "obstore",
    "gcloud-aio-storage",
    "google-cloud-storage",
    "gcsfs",
    "aiohttp",
    "requests",
    "google-crc32c",
)
_ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Return the fields about versions, machine and commit that every JSON line has."""
    return {"versions": _versions(), "machine": _machine(), **_commit()}


def summary(circumstances: dict[str, Any]) -> str:
    """Return the result of `describe` as one line of text."""
    machine, versions = circumstances["machine"], circumstances["versions"]
    dirty = " with changes" if circumstances["is_dirty"] else ""
    return (
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} "
        f"GiB, {machine['kernel']}; Python {versions['python']}, aioflux {versions['aioflux']} at "
        f"{circumstances['commit'][:9]}{dirty}; "
        + ", ".join(
            f"{name} {found}"
            for name, found in versions.items()
            if found and name not in {"python", "aioflux"}
        )
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "aioflux": aioflux.__version__,
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["nginx"] = _first("nginx version: nginx/([0-9.]+)", "nginx", "-v")
    found["wrk"] = _first(r"wrk (?:debian/)?([0-9.]+)", "wrk", "-v")
    found["OpenSSL"] = ssl.OPENSSL_VERSION.split()[1]
    return found


def _first(pattern: str, program: str, *arguments: str) -> str | None:
    """Return the first group of a pattern in a program's output; None if it is not installed."""
    # On Debian, the PATH of ordinary users does not contain sbin.
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    if (where := shutil.which(program, path=places)) is None:
        return None
    done = subprocess.run(  # noqa: S603
        [where, *arguments], capture_output=True, text=True, check=False
    )
    match = re.search(pattern, done.stdout + done.stderr)
    return match[1] if match else "?"


def _machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _commit() -> dict[str, Any]:
    """Return the commit, and whether tracked files differ from it; `unknown` outside of git."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return {"commit": "unknown", "is_dirty": None}
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(  # noqa: S603
        ["git", "-C", str(_ROOT), *arguments],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()

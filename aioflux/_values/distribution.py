"""Name under which pip installs the package.

The distribution `aioflux` at PyPI is another project, with the same import name.
"""

from __future__ import annotations

from typing import Final

DISTRIBUTION: Final = "aioflux-storage"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, for messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"

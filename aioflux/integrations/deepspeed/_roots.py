"""Directories that stand for uris while DeepSpeed looks at them, with empty files for the parts."""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from typing import Final

from aioflux._values.uri import SCHEMES, parse_uri, quote_path
from aioflux.errors import CheckpointError

__all__ = ["LATEST", "Roots", "is_uri", "put_placeholders"]

LATEST: Final = "latest"
"""Name of the file, and of the object, that holds the newest tag."""


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory of DeepSpeed is a uri.

    Raises:
        ValueError: It was one before `pathlib.Path` took a slash out of it.
    """
    text = os.fspath(path)
    if "://" in text:
        return True
    if any(text.startswith(f"{scheme}:/") for scheme in SCHEMES):
        raise ValueError(
            f"{text!r} was a uri before pathlib took a slash out of it; pass it as a string"
        )
    return False


class Roots:
    """Which directory of this process stands for which uri."""

    def __init__(self) -> None:
        self._by_uri: dict[str, str] = {}
        self._by_directory: dict[str, str] = {}

    def stand_in(self, uri: str) -> str:
        """Return the directory that stands for a uri, made where it is not there."""
        uri = str(parse_uri(uri)).rstrip("/")
        directory = self._by_uri.get(uri)
        if directory is None:
            directory = tempfile.mkdtemp(prefix="aioflux-deepspeed-")
            # A process that multiprocessing has started runs no other hook at its end.
            Finalize(self, shutil.rmtree, (directory, True), exitpriority=0)
            self._by_uri[uri] = directory
            self._by_directory[directory] = uri
        return directory

    def uri_of(self, directory: str | os.PathLike[str]) -> str:
        """Return the uri of a directory: what it stands for, or its own.

        Raises:
            CheckpointError: It is a uri, which DeepSpeed itself cannot look at.
        """
        path = os.fspath(directory)
        if is_uri(path):
            raise CheckpointError(
                f"DeepSpeed looks at {path} by itself, as at a directory; let it have one in its "
                "place: aioflux.integrations.deepspeed.attach(engine)"
            )
        absolute = os.path.abspath(path)
        return self._by_directory.get(absolute) or f"file://{quote_path(absolute)}"

    def split(self, directory: str) -> tuple[str, str]:
        """Return root and tag of the directory of a tag, which may have slashes below a uri."""
        root, tag = os.path.split(directory)
        above, below = root, tag
        while os.path.dirname(above) != above:
            if os.path.abspath(above) in self._by_directory:
                return above, below
            above, name = os.path.split(above)
            below = f"{name}/{below}"
        return root, tag

    def close(self) -> None:
        """Remove the directories."""
        for directory in self._by_directory:
            shutil.rmtree(directory, ignore_errors=True)
        self._by_uri.clear()
        self._by_directory.clear()


def put_placeholders(directory: str, tag: str, names: list[str]) -> None:
    """Show DeepSpeed the parts of a tag as empty files: it looks for them and reads none.

    Raises:
        CheckpointError: A tag or a name leads out of the directory.
    """
    root = os.path.abspath(directory)
    below = os.path.join(root, tag)
    paths = [os.path.join(below, name) for name in names]
    for path in (below, *paths):
        if not os.path.abspath(path).startswith(f"{root.rstrip('/')}/"):
            raise CheckpointError(
                f"DeepSpeed has the parts of a tag in a directory, and {path!r} is not below {root}"
            )
    os.makedirs(below, exist_ok=True)
    for path in paths:
        with open(path, "ab"):
            pass

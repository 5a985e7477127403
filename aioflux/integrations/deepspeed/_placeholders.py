"""Local directories with empty files that DeepSpeed inspects in place of uris."""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from typing import Final

from aioflux._values.uri import SCHEMES, local_uri, parse_uri
from aioflux.errors import CheckpointError

__all__ = ["LATEST", "Placeholders", "is_uri", "put_placeholders"]

LATEST: Final = "latest"
"""Name of the file, and of the object, that contains the newest tag."""


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory of DeepSpeed is a uri.

    Raises:
        ValueError: It was one before `pathlib.Path` removed a slash.
    """
    text = os.fspath(path)
    if "://" in text:
        return True
    if any(text.startswith(f"{scheme}:/") for scheme in SCHEMES):
        raise ValueError(f"{text!r} was a uri before pathlib removed a slash; pass it as a string")
    return False


class Placeholders:
    """Temporary directories of this process, one for each uri."""

    def __init__(self) -> None:
        self._by_uri: dict[str, str] = {}
        self._by_directory: dict[str, str] = {}

    def directory_of(self, uri: str) -> str:
        """Return the directory of a uri, created on first use."""
        uri = str(parse_uri(uri)).rstrip("/")
        directory = self._by_uri.get(uri)
        if directory is None:
            directory = tempfile.mkdtemp(prefix="aioflux-deepspeed-")
            # A process of multiprocessing runs no other hook when it exits.
            Finalize(self, shutil.rmtree, (directory, True), exitpriority=0)
            self._by_uri[uri] = directory
            self._by_directory[directory] = uri
        return directory

    def uri_of(self, directory: str | os.PathLike[str]) -> str:
        """Return the uri whose placeholder a directory is, or else its own.

        Raises:
            CheckpointError: It is a uri, which DeepSpeed itself cannot inspect.
        """
        path = os.fspath(directory)
        if is_uri(path):
            raise CheckpointError(
                f"DeepSpeed itself opens {path} as a directory; give it a placeholder: "
                "aioflux.integrations.deepspeed.attach(engine)"
            )
        return self._by_directory.get(os.path.abspath(path)) or local_uri(path)

    def split_tag(self, directory: str) -> tuple[str, str]:
        """Return root and tag of the directory of a tag; below a uri tags may have slashes."""
        root, tag = os.path.split(directory)
        parent, below = root, tag
        while os.path.dirname(parent) != parent:
            if os.path.abspath(parent) in self._by_directory:
                return parent, below
            parent, name = os.path.split(parent)
            below = f"{name}/{below}"
        return root, tag

    def close(self) -> None:
        """Remove the directories."""
        for directory in self._by_directory:
            shutil.rmtree(directory, ignore_errors=True)
        self._by_uri.clear()
        self._by_directory.clear()


def put_placeholders(directory: str, tag: str, names: list[str]) -> None:
    """Create empty files for the parts of a tag: DeepSpeed looks for them and reads none.

    Raises:
        CheckpointError: A tag or a name is not below the directory.
    """
    root = os.path.abspath(directory)
    below = os.path.join(root, tag)
    paths = [os.path.join(below, name) for name in names]
    for path in (below, *paths):
        if not os.path.abspath(path).startswith(f"{root.rstrip('/')}/"):
            raise CheckpointError(
                f"the parts of a tag are in one directory, and {path!r} is not below {root}"
            )
    os.makedirs(below, exist_ok=True)
    for path in paths:
        with open(path, "ab"):
            pass

"""Temporary local directories with empty files, because DeepSpeed checks that files exist."""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from typing import Final

from aioflux._values.uri import SCHEMES, local_uri, parse_uri
from aioflux.errors import CheckpointError

LATEST: Final = "latest"
"""Name of the file or object that contains the newest tag."""


def is_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory of DeepSpeed is a uri.

    Raises:
        ValueError: `pathlib.Path` has removed a slash of the uri.
    """
    text = os.fspath(path)
    if "://" in text:
        return True
    if any(text.startswith(f"{scheme}:/") for scheme in SCHEMES):
        raise ValueError(f"pathlib removed a slash of the uri {text!r}; pass it as a string")
    return False


class Placeholders:
    """The temporary directories of this process, one for each uri."""

    def __init__(self) -> None:
        self._by_uri: dict[str, str] = {}
        self._by_directory: dict[str, str] = {}

    def directory_of(self, uri: str) -> str:
        """Return the directory of a uri; create it if it does not exist."""
        uri = str(parse_uri(uri)).rstrip("/")
        directory = self._by_uri.get(uri)
        if directory is None:
            directory = tempfile.mkdtemp(prefix="aioflux-deepspeed-")
            # `Finalize`, because processes of multiprocessing do not run functions of `atexit`.
            Finalize(self, shutil.rmtree, (directory, True), exitpriority=0)
            self._by_uri[uri] = directory
            self._by_directory[directory] = uri
        return directory

    def uri_of(self, directory: str | os.PathLike[str]) -> str:
        """Return the uri of a temporary directory; for any other directory, its `file:` uri.

        Raises:
            CheckpointError: `directory` is a uri, which DeepSpeed would use as a local directory.
        """
        path = os.fspath(directory)
        if is_uri(path):
            raise CheckpointError(
                f"DeepSpeed cannot open {path}, which is not a local directory; call "
                "aioflux.integrations.deepspeed.attach(engine) first"
            )
        return self._by_directory.get(os.path.abspath(path)) or local_uri(path)

    def split_tag(self, directory: str) -> tuple[str, str]:
        """Split the directory of a tag into root and tag; the tag of a uri may contain slashes."""
        root, tag = os.path.split(directory)
        parent, relative = root, tag
        while os.path.dirname(parent) != parent:
            if os.path.abspath(parent) in self._by_directory:
                return parent, relative
            parent, name = os.path.split(parent)
            relative = f"{name}/{relative}"
        return root, tag

    def close(self) -> None:
        """Delete the directories."""
        for directory in self._by_directory:
            shutil.rmtree(directory, ignore_errors=True)
        self._by_uri.clear()
        self._by_directory.clear()


def put_placeholders(directory: str, tag: str, names: list[str]) -> None:
    """Create empty files for the parts of a tag, because DeepSpeed checks that they exist.

    Raises:
        CheckpointError: A file would not be below `directory`.
    """
    root = os.path.abspath(directory)
    tag_directory = os.path.join(root, tag)
    paths = [os.path.join(tag_directory, name) for name in names]
    for path in (tag_directory, *paths):
        if not os.path.abspath(path).startswith(f"{root.rstrip('/')}/"):
            raise CheckpointError(
                f"{path!r} is not below {root}; use tags and names of parts without '..'"
            )
    os.makedirs(tag_directory, exist_ok=True)
    for path in paths:
        with open(path, "ab"):
            pass

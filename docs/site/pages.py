"""Pages of `docs/`, with links that work on the site.

On a git host a page links to other pages, to pictures, and to files outside of `docs/`. On the site
the first two stay as they are; a public module becomes its page in the reference, and any other
file becomes the url of the file in the repository. A link whose text is the name of a page has the
title of that page.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

__all__ = ["REPOSITORY", "ROOT", "copy_pages", "rewrite_links"]

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/aioflux/aioflux"
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?:(?<=\[)[\w-]+\.md)?\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)


def copy_pages(target: Path, modules: dict[str, str]) -> None:
    """Copy all pages and pictures of `docs/` into the folder `target`.

    Args:
        target: Folder of the site's source.
        modules: Page below `docs/` of each public module, by the path of the module's file.
    """
    docs = ROOT / "docs"
    for source in sorted(docs.rglob("*")):
        copy = target / source.relative_to(docs)
        if source.suffix == ".md":
            copy = copy.with_name(_renamed(copy.name))
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            page = source.relative_to(ROOT).as_posix()
            copy.write_text(rewrite_links(text, page, modules), encoding="utf-8")
        elif source.parent.name == "images":
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def rewrite_links(text: str, page: str, modules: dict[str, str]) -> str:
    """Return a page with links for the site; code is left as it is.

    Args:
        text: Text of the page.
        page: Path of the page, relative to the root of the repository.
        modules: As in `copy_pages`.
    """
    folder = posixpath.dirname(page)
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_rewrite(text[end : code.start()], folder, modules), code[0]]
        end = code.end()
    return "".join([*parts, _rewrite(text[end:], folder, modules)])


def _rewrite(text: str, folder: str, modules: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        named = match[0].partition("]")[0]
        title = _title(path) if named else ""
        return f"{title}]({_target(path, folder, modules)}{match[2] or ''})"

    return _LINK.sub(replace, text)


def _title(path: str) -> str:
    """Return the first heading of a page, up to a colon."""
    file = ROOT / path
    found = _TITLE.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1].partition(": ")[0] if found else path


def _target(path: str, folder: str, modules: dict[str, str]) -> str:
    """Return the link to a file of the repository, on a page in `folder`."""
    if path in modules:
        return posixpath.relpath(f"docs/{modules[path]}", folder)
    if path.startswith("docs/"):
        page = posixpath.join(posixpath.dirname(path), _renamed(posixpath.basename(path)))
        return posixpath.relpath(page, folder)
    return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def _renamed(name: str) -> str:
    """Return the name of a page on the site, whose folders are opened by `index.md`."""
    return "index.md" if name == "README.md" else name

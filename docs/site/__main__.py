"""Write the source of the site to `build/docs`."""

from __future__ import annotations

import shutil

from docs.site.command_line import command_page
from docs.site.pages import ROOT, copy_pages
from docs.site.reference import module_pages, navigation, reference_pages

if __name__ == "__main__":
    target = ROOT / "build" / "docs"
    shutil.rmtree(target, ignore_errors=True)
    copy_pages(target, module_pages())
    pages = reference_pages() | {
        "reference/command-line.md": command_page(),
        "reference/SUMMARY.md": navigation(),
    }
    for name, text in pages.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

"""Comparison of the built site with the code: every public name, member and command is described.

    python -m docs.site.check

Exit status: 1 if something is missing, which is printed.
"""

from __future__ import annotations

import sys

from mkdocstrings import Inventory

from docs.site.command_line import commands
from docs.site.pages import ROOT
from docs.site.reference import ON_ONE_PAGE, public_members, public_modules

__all__ = ["missing"]


def missing() -> list[str]:
    """Return the public names and commands that the built site does not describe."""
    site = ROOT / "site"
    with (site / "objects.inv").open("rb") as file:
        inventory = Inventory.parse_sphinx(file)
    described = {name: item.uri.partition("#")[0] for name, item in inventory.items()}
    found = []
    for module in public_modules():
        found += [path for path in module.results if path not in described]
        for name in module.own:
            page = name.page.partition("#")[0].removesuffix("index.md").removesuffix(".md")
            members = public_members(name, inherited=module.name not in ON_ONE_PAGE)
            found += [
                path
                for path in (name.path, *members)
                if described.get(path, "").strip("/") != page.strip("/")
            ]
    text = (site / "reference" / "command-line" / "index.html").read_text(encoding="utf-8")
    headings = {words: f'id="{words.replace(" ", "-")}"' for words in commands() if " " in words}
    return found + [words for words, heading in headings.items() if heading not in text]


if __name__ == "__main__":
    names = missing()
    for each in names:
        sys.stdout.write(f"the site does not describe {each}\n")
    sys.exit(1 if names else 0)

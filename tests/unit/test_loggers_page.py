"""docs/monitoring.md lists the loggers of the package with the levels at which they log."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "monitoring.md"
LEVELS = {"exception": "ERROR"}
"""Levels of methods with another name than their level."""


def used_levels() -> Iterator[tuple[str, str]]:
    """Yield the logger and the level of each method of a module's `_log` or `_..._log`."""
    for path in sorted((ROOT / "aioflux").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found = re.findall(
            r"^(_(?:\w+_)?log)(?:: \S+)? = logging.getLogger\((.*)\)$", source, re.MULTILINE
        )
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for variable, name in found:
            logger = module if name == "__name__" else ast.literal_eval(name)
            for method in re.findall(rf"\b{variable}\.(\w+)", source):
                if method != "isEnabledFor":
                    yield logger, LEVELS.get(method, method.upper())


def test_each_logger_and_level_is_on_the_page_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(aioflux[\w.]*)` \| ([A-Z]+) \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(set(used_levels()))

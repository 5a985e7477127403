"""Page of the command `aioflux`, from the help of its commands."""

from __future__ import annotations

import re
from typing import Any

import typer.main

import aioflux.cli
from aioflux.cli._app import _add_commands, app

__all__ = ["command_page", "commands"]

_STATUS = re.compile(r"^Exit status: (.*?)\.$", re.MULTILINE | re.DOTALL)

_TITLE = """---
title: The command aioflux
---

# The command `aioflux`
"""
_MAIN = """## From Python

::: aioflux.cli.main
    options:
      heading_level: 3
"""


def commands() -> dict[str, Any]:
    """Return each command by its words, groups of commands before their own."""
    _add_commands([])
    found: dict[str, Any] = {}

    def add(words: str, command: Any) -> None:
        found[words] = command
        for name, each in getattr(command, "commands", {}).items():
            add(f"{words} {name}", each)

    add("aioflux", typer.main.get_command(app))
    return found


def command_page() -> str:
    """Return the page, in Markdown."""
    sections = [_section(words, command) for words, command in commands().items()]
    return "\n".join(
        ["---\ntitle: Command line\n---\n", "# The command `aioflux`\n", *sections, _MAIN]
    )


def _section(words: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([words, "[OPTIONS]", *(_metavar(each) for each in arguments)])
    if hasattr(command, "commands"):
        usage += " COMMAND"
    lines = [] if words == "aioflux" else [f"## `{words}`", ""]
    lines += ["```text", usage, "```", "", command.help, ""]
    if arguments:
        rows = [f"| `{_metavar(each)}` | {each.help} |" for each in arguments]
        lines += ["| argument | is |", "| --- | --- |", *rows, ""]
    if options:
        rows = [f"| {_names(each)} | {_meaning(each)} |" for each in options]
        lines += ["| option | effect |", "| --- | --- |", *rows, ""]
    if words == "aioflux":
        lines += ["## Exit status", "", *_exit_status()]
    return "\n".join(lines)


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _names(option: Any) -> str:
    """Return the names of an option, the long one first, with the name of its value."""
    names = [*option.opts, *option.secondary_opts]
    shown = [f"`{name}`" for name in sorted(names, key=lambda name: not name.startswith("--"))]
    return ", ".join(shown) + ("" if option.is_flag else f" `{_metavar(option)}`")


def _meaning(option: Any) -> str:
    """Return the help of an option, with its bounds, default and environment variable."""
    lowest, highest = option.min, option.max
    facts = []
    if lowest is not None:
        facts.append(f"from {lowest}" if highest is None else f"{lowest} to {highest}")
    if option.envvar:
        facts.append(f"environment variable {option.envvar}")
    if not option.is_flag and option.default not in (None, "", 0):
        facts.append(f"default `{option.default}`")
    text = (option.help or "").replace("|", "\\|")
    return f"{text} ({'; '.join(facts)})" if facts else text


def _exit_status() -> list[str]:
    found = _STATUS.search(aioflux.cli.__doc__ or "")
    assert found is not None
    rows = [each.strip().partition(" ") for each in re.split(r", (?=\d)", found[1])]
    return ["| status | is |", "| --- | --- |", *(f"| {a} | {b} |" for a, _, b in rows), ""]

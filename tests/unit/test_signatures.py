"""The parameters of all public functions, classes and methods are those in `signatures.txt`.

A change of a public name changes that file, and belongs in the changelog:
`python -m tests.unit.test_signatures > tests/unit/signatures.txt`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias
from typing import Any, is_typeddict

from tests.unit.test_public_names import load, public_modules

FILE = Path(__file__).with_name("signatures.txt")
OPTIONAL = ("aioflux.integrations.", "aioflux.compat.")
"""Below these are modules that an optional package is needed for."""


def signatures() -> Iterator[str]:
    for module in public_modules():
        if module.startswith(OPTIONAL):
            continue
        names = getattr(load(module), "__all__", ())
        for name in sorted(names):
            yield from described(f"{module}.{name}", getattr(load(module), name))


def described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type) and not isinstance(value, GenericAlias):
        if is_typeddict(value):
            yield f"{name}: {', '.join(value.__annotations__)}"
        elif value.__module__.startswith("aioflux") and not issubclass(value, BaseException):
            yield f"{name}{parameters(value)}"
            for member, method in sorted(vars(value).items()):
                function = getattr(method, "__func__", method)
                if not member.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{member}{parameters(function)}"
    elif inspect.isfunction(value):
        yield f"{name}{parameters(value)}"


def parameters(function: Any) -> str:
    """Names, kinds and defaults; annotations are no part of the interface."""
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r" at 0x\w+", "", " ".join(text.split()))


def test_public_signatures_are_unchanged() -> None:
    assert list(signatures()) == FILE.read_text().splitlines()


if __name__ == "__main__":
    print(*signatures(), sep="\n")  # noqa: T201

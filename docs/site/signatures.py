"""Extension of griffe for signatures that say what a reader needs.

* `**options: Unpack[SomeOptions]` is replaced by the keywords. A TypedDict has neither defaults nor
  descriptions of its keys: both are those of the function, or dataclass, whose keywords the
  TypedDict repeats, as `mkdocs.yml` says.
* A private alias, such as the `Tail` of a dataset, is replaced by what it means: its values, or its
  types.
* `aioflux.open_store` in a docstring is a link, if the reference has the name.
* An attribute that is set to an argument, `self.uri = uri`, has the type of the argument.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ReadableSignatures"]

_NAME = re.compile(r"(?<!`)`(aioflux(?:\.\w+)+)(?:\(\))?`(?!`)")
_LABELS = {"class-attribute", "instance-attribute", "module-attribute", "dataclass"}
"""Labels that are left out."""


class ReadableSignatures(griffe.Extension):
    """Replace `**options` and aliases, link names, give attributes the types of arguments.

    Args:
        keywords: Path of the function or dataclass that has the keywords of a TypedDict, by the
            path of the TypedDict.
    """

    def __init__(self, keywords: dict[str, str]) -> None:
        self._sources = keywords

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change a package that was loaded."""
        definitions = list(_definitions(pkg))
        exported = {name for module in _modules(pkg) for name in map(str, module.exports or ())}
        for each in definitions:
            each.labels -= _LABELS
            _link_names(each)
            if isinstance(each, griffe.Attribute):
                _add_type(each)
            _expand_aliases(each, exported)
        for each in definitions:
            if isinstance(each, griffe.Function):
                self._show_keywords(each)

    def _show_keywords(self, function: griffe.Function) -> None:
        for parameter in list(function.parameters):
            annotation = parameter.annotation
            if (
                parameter.kind is griffe.ParameterKind.var_keyword
                and isinstance(annotation, griffe.ExprSubscript)
                and annotation.canonical_path.endswith(".Unpack")
                and isinstance(annotation.slice, griffe.Expr)
            ):
                path = annotation.slice.canonical_path
                source = function.modules_collection.get_member(self._sources[path])
                _insert(function, parameter.name, _keys(function, path), source)


def _definitions(
    owner: griffe.Module | griffe.Class,
) -> Iterator[griffe.Function | griffe.Attribute | griffe.Class]:
    """Yield what is defined in a module or class, at any depth."""
    for member in owner.members.values():
        if isinstance(member, griffe.Function | griffe.Attribute | griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _definitions(member)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield a module and all public modules below it."""
    yield module
    for each in module.modules.values():
        if not each.is_alias and not each.name.startswith("_"):
            yield from _modules(each)


def _expand_aliases(definition: griffe.Object, exported: set[str]) -> None:
    """Replace the aliases of types in a signature, except those that are exported."""

    def expand(annotation: Any) -> Any:
        match annotation:
            case griffe.ExprName(name=name):
                found = None if name in exported else _alias(annotation, definition)
                return annotation if found is None else found
            case griffe.ExprBinOp(left=left, right=right):
                return replace(annotation, left=expand(left), right=expand(right))
            case griffe.ExprSubscript(slice=inner):
                return replace(annotation, slice=expand(inner))
            case griffe.ExprTuple(elements=elements) | griffe.ExprList(elements=elements):
                return replace(annotation, elements=[expand(each) for each in elements])
        return annotation

    if isinstance(definition, griffe.Function):
        definition.returns = expand(definition.returns)
        for parameter in definition.parameters:
            parameter.annotation = expand(parameter.annotation)
    elif isinstance(definition, griffe.Attribute):
        definition.annotation = expand(definition.annotation)


def _alias(name: griffe.ExprName, definition: griffe.Object) -> griffe.Expr | None:
    """Return the value of an alias of types that is defined in the package."""
    if not name.canonical_path.startswith("aioflux."):
        return None
    found: Any = definition.modules_collection
    try:
        found = found.get_member(name.canonical_path)
        found = found.final_target if found.is_alias else found
    except (KeyError, griffe.AliasResolutionError):
        return None
    is_alias = isinstance(found, griffe.Attribute) and isinstance(found.parent, griffe.Module)
    value = found.value if is_alias else None
    return value if isinstance(value, griffe.ExprBinOp | griffe.ExprSubscript) else None


def _link_names(definition: griffe.Object) -> None:
    """Link names such as `aioflux.open_store` in a docstring, if the reference has them."""
    if definition.docstring:
        definition.docstring.value = _NAME.sub(
            r'<autoref identifier="\1" optional><code>\1</code></autoref>',
            definition.docstring.value,
        )


def _add_type(attribute: griffe.Attribute) -> None:
    """Replace the value of an attribute by a type if the value is an argument of `__init__`."""
    init = attribute.parent.members.get("__init__") if attribute.parent else None
    if isinstance(init, griffe.Function) and isinstance(attribute.value, griffe.ExprName):
        arguments = {each.name: each for each in init.parameters}
        if argument := arguments.get(attribute.value.name):
            attribute.annotation = attribute.annotation or argument.annotation
            attribute.value = None


def _keys(function: griffe.Function, path: str) -> list[str]:
    """Return the keys of a TypedDict and of its base classes."""
    found = function.modules_collection.get_member(path)
    bases = [base.canonical_path for base in found.bases if isinstance(base, griffe.Expr)]
    inherited = [_keys(function, base) for base in bases if not base.startswith("typing.")]
    return [*(name for names in inherited for name in names), *found.attributes]


def _insert(
    function: griffe.Function, options: str, keys: list[str], source: griffe.Object
) -> None:
    """Put keywords in the place of `**options`, as they are in the signature of `source`."""
    parameters, described = _signature(source)
    own = _described(function)  # parsed once, while the signature still has `options`
    own[:] = [each for each in own if each.name.lstrip("*") != options]
    del function.parameters[options]
    for name in keys:
        if name not in {each.name for each in function.parameters}:
            function.parameters.add(parameters[name])
            own.append(described[name])


def _signature(
    source: griffe.Object,
) -> tuple[dict[str, griffe.Parameter], dict[str, griffe.DocstringParameter]]:
    """Return the keywords of a function or of a dataclass, and their descriptions."""
    if isinstance(source, griffe.Function):
        return (
            {each.name: each for each in source.parameters},
            {each.name: each for each in _described(source)},
        )
    parameters, described = {}, {}
    for each in source.attributes.values():
        default = str(each.value)
        parameters[each.name] = griffe.Parameter(
            each.name,
            annotation=each.annotation,
            default=default,
            kind=griffe.ParameterKind.keyword_only,
        )
        described[each.name] = griffe.DocstringParameter(
            each.name,
            annotation=each.annotation,
            description=each.docstring.value if each.docstring else "",
            value=default,
        )
    return parameters, described


def _described(function: griffe.Function) -> list[griffe.DocstringParameter]:
    """Return the parameters in the docstring of a function, or of the class that it builds."""
    owners = [function, function.parent] if function.name == "__init__" else [function]
    for owner in owners:
        for section in owner.docstring.parsed if owner and owner.docstring else ():
            if isinstance(section, griffe.DocstringSectionParameters):
                return section.value
    return []

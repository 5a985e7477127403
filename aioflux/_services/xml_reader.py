"""XML bodies of responses, read with limits, without a tree in memory. No I/O.

A body of 60 MiB without limits became 1.5 GB of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from aioflux._services.base import MAX_PAGE_ENTRIES

_MAX_DEPTH: Final = 32
_MAX_TEXT: Final = 256 * 1024
"""Largest number of characters in one element."""
_MAX_ELEMENTS: Final = 10_000
"""Largest number of elements outside of entries."""
_MAX_ENTRY_ELEMENTS: Final = 200
"""Largest number of elements of an entry, on average. A blob has 22, and one for each name in its
metadata."""
_PIECE_BYTES: Final = 64 * 1024
"""Bytes that are parsed at once. A tag may be as long, or twice as long if it begins in between."""


def read_xml(
    data: bytes | bytearray | memoryview,
    entries: Mapping[str, Callable[[dict[str, str]], object]] | None = None,
    *,
    max_entries: int = MAX_PAGE_ENTRIES,
) -> tuple[str, dict[str, str]]:
    """Parse a body, and call a function for each of its entries, such as the objects of a page.

    Texts are returned by the path of their element, such as `Owner/ID`, without namespaces. The
    last element of a path counts.

    Args:
        data: The body.
        entries: Functions by the path of the entry below the root. They receive the texts of the
            entry, by the path below the entry, and its attributes, as `<path>@<name>`.
        max_entries: Largest number of entries.

    Returns:
        The name of the root, and the texts outside of entries, by the path below the root.

    Raises:
        ValueError: The body is not XML, or exceeds a limit.
    """
    # Imported here, because reads and small writes need no XML.
    from xml.parsers import expat

    functions = entries or {}
    fields: dict[str, str] = {}
    texts, entry_depth = fields, 0  # of the current entry
    function: Callable[[dict[str, str]], object] | None = None
    root = path = ""
    text: str | None = None  # of the current element; None after an inner element
    parents: list[str] = []  # paths of the elements around the current one
    num_entries, num_left = 0, _MAX_ELEMENTS

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal texts, function, entry_depth, root, path, text, num_entries, num_left
        parents.append(path)
        num_left -= 1
        if len(parents) > _MAX_DEPTH or num_left < 0:
            raise ValueError(
                f"it has more than {_MAX_ELEMENTS:,} elements that are not of an entry"
                if num_left < 0
                else f"its elements are nested more than {_MAX_DEPTH} deep"
            )
        if ":" in tag:
            tag = tag.rpartition(":")[2]
        path = f"{path}/{tag}" if path else tag
        if not entry_depth:
            if len(parents) == 1:
                root, path = tag, ""
            elif (function := functions.get(path)) is not None:
                texts, entry_depth, path = {}, len(parents), ""
                num_entries += 1
                num_left += _MAX_ENTRY_ELEMENTS
                if num_entries > max_entries:
                    raise ValueError(f"it has more than {max_entries:,} entries")
        elif attributes:
            texts.update({f"{path}@{name}": value for name, value in attributes.items()})
        text = ""

    def end(tag: str) -> None:
        nonlocal texts, entry_depth, path, text
        if text is not None:
            texts[path] = text
            text = None
        elif not entry_depth:
            texts[path] = ""
        path = parents.pop()
        if len(parents) < entry_depth:
            assert function is not None
            function(texts)
            texts, entry_depth = fields, 0

    def add_text(more: str) -> None:
        nonlocal text
        if text is not None:
            text = text + more if text else more
            if len(text) > _MAX_TEXT:
                raise ValueError(f"an element has more than {_MAX_TEXT:,} characters")

    def reject(*_: Any) -> None:
        raise ValueError("it has a document type")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = add_text, reject
    view = memoryview(data)
    try:
        for index in range(0, len(view), _PIECE_BYTES):
            parser.Parse(view[index : index + _PIECE_BYTES], False)
            if index - parser.CurrentByteIndex > _PIECE_BYTES:
                raise ValueError(f"a tag has more than {_PIECE_BYTES:,} bytes")
        parser.Parse(b"", True)
    except expat.ExpatError as exc:
        raise ValueError(f"the response is not XML: {exc}") from exc
    fields.pop("", None)  # the text of the root
    return root, fields


def parse_fields(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """Return the text of each child of the root of an XML body, by name.

    Raises:
        ValueError: The body is not XML, or exceeds a limit.
    """
    return read_xml(data)[1]


def parse_error(data: bytes | bytearray | memoryview) -> tuple[str, str]:
    """Return (code, message) of an XML error body; empty strings if it is malformed."""
    try:
        fields = parse_fields(data)
    except ValueError:
        return "", ""
    return fields.get("Code", ""), fields.get("Details") or fields.get("Message", "")

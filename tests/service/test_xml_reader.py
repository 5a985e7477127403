"""XML bodies are read with limits on depth, entries, elements, texts and tags."""

from __future__ import annotations

import tracemalloc
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._services.xml_reader import parse_error, parse_fields, read_xml

MIB = 1024 * 1024


def test_fields_are_read_with_and_without_namespaces() -> None:
    plain = b"<R><UploadId>x&amp;y</UploadId><Empty/></R>"
    spaced = b"<R xmlns='urn:z'><UploadId>x&amp;y</UploadId><Empty/></R>"
    prefixed = b"<n:R xmlns:n='urn:z'><n:UploadId>x&amp;y</n:UploadId><n:Empty/></n:R>"
    for body in (plain, bytearray(plain), memoryview(spaced), prefixed, b"\xef\xbb\xbf" + plain):
        assert parse_fields(body) == {"UploadId": "x&y", "Empty": ""}


@pytest.mark.parametrize("body", [b"{}", b"", b"<R>", b"<R></Q>", b"<R/><R/>", b"<R>&x;</R>"])
def test_what_is_not_xml_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="not XML"):
        parse_fields(body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<Error><Code>NoSuchKey</Code><Message>m</Message></Error>", ("NoSuchKey", "m")),
        (b"<Error><Code>C</Code><Message>m</Message><Details>d</Details></Error>", ("C", "d")),
        (b"<html><p>no", ("", "")),
        (b"", ("", "")),
    ],
)
def test_an_error_body_reports_code_and_words(body: bytes, expected: tuple[str, str]) -> None:
    assert parse_error(body) == expected


def test_entries_have_the_texts_and_attributes_below_them() -> None:
    body = (
        b"<R><Rows><Row><Name Encoded='true'>a</Name><P>\n<X>1</X>\n<Y/></P></Row>\n"
        b"<Row><Name>b</Name></Row><Leaf>c</Leaf></Rows><Next>n</Next></R>"
    )
    rows: list[dict[str, str]] = []
    leaves: list[dict[str, str]] = []
    root, fields = read_xml(body, {"Rows/Row": rows.append, "Rows/Leaf": leaves.append})
    assert root == "R"
    assert fields == {"Rows": "", "Next": "n"}
    assert rows == [{"Name@Encoded": "true", "Name": "a", "P/X": "1", "P/Y": ""}, {"Name": "b"}]
    assert leaves == [{"": "c"}]


trees = st.recursive(
    st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=5),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
    max_leaves=20,
)


def build(parent: ET.Element, tree: dict[str, object] | str) -> None:
    if isinstance(tree, str):
        parent.text = tree
        return
    for name, inner in tree.items():
        build(ET.SubElement(parent, name), inner)  # type: ignore[arg-type]


def flatten(tree: dict[str, object] | str, path: str = "") -> dict[str, str]:
    if isinstance(tree, str):
        return {path: tree}
    texts = {path: ""}
    for name, inner in tree.items():
        texts |= flatten(inner, f"{path}/{name}" if path else name)  # type: ignore[arg-type]
    return texts


@given(tree=trees, copies=st.integers(1, 3000))
def test_any_body_is_read_as_it_was_written(tree: dict[str, object] | str, copies: int) -> None:
    """Also if it is parsed in several pieces."""
    root = ET.Element("R")
    for _ in range(min(copies, 3)):
        build(ET.SubElement(root, "Row"), tree)
    row = ET.tostring(root.find("Row"), encoding="utf-8").removeprefix(  # type: ignore[arg-type]
        b"<?xml version='1.0' encoding='utf-8'?>\n"
    )
    rows: list[dict[str, str]] = []
    read_xml(b"<R>" + row * copies + b"</R>", {"Row": rows.append})
    expected = {path: text for path, text in flatten(tree).items() if path or isinstance(tree, str)}
    leaves = {
        path: text
        for path, text in expected.items()
        if not any(other.startswith(path + "/") for other in expected)
    }
    assert rows == [leaves] * copies


DEEP = b"<R>" + b"<a>" * 31 + b"</a>" * 31 + b"</R>"
ATTACKS = {
    "depth": (b"<R>" + b"<a>" * 2_000_000, "nested more than 32 deep"),
    "elements": (b"<R>" + b"<a/>" * 2_000_000 + b"</R>", "more than 10,000 elements"),
    "names": (
        b"<R>" + b"".join(b"<a%d/>" % number for number in range(500_000)) + b"</R>",
        "more than 10,000 elements",
    ),
    "entries": (b"<R>" + b"<Row/>" * 1_000_000 + b"</R>", "more than 1,000 entries"),
    "elements of entries": (
        b"<R>" + (b"<Row>" + b"<a/>" * 2000 + b"</Row>") * 100 + b"</R>",
        "more than 10,000 elements",
    ),
    "text": (b"<R><a>" + b"x" * 8 * MIB + b"</a></R>", "more than 262,144 characters"),
    "attributes": (
        b"<R " + b" ".join(b'a%d=""' % number for number in range(500_000)) + b"/>",
        "a tag has more than 65,536 bytes",
    ),
    "comment": (b"<R><!--" + b"x" * 8 * MIB + b"--></R>", "a tag has more than 65,536 bytes"),
    "entities": (
        b'<!DOCTYPE R [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]><R>&b;</R>',
        "document type",
    ),
}


@pytest.mark.parametrize(("body", "why"), ATTACKS.values(), ids=ATTACKS)
def test_a_body_over_a_limit_is_an_error_before_it_takes_memory(body: bytes, why: str) -> None:
    rows: list[dict[str, str]] = []
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=why):
            read_xml(body, {"Row": rows.append}, max_entries=1000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6 * MIB


def test_a_body_within_the_limits_is_read() -> None:
    assert read_xml(DEEP)[0] == "R"
    rows: list[dict[str, str]] = []
    row = b"<Row>" + b"".join(b"<a%d>x</a%d>" % (number, number) for number in range(150))
    read_xml(b"<R>" + (row + b"</Row>") * 1000 + b"</R>", {"Row": rows.append}, max_entries=1000)
    assert [len(row) for row in rows] == [150] * 1000

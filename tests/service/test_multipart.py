"""The multipart protocol: targets, bodies and answers."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime

import pytest

from aioflux._services import xml_multipart as multipart
from aioflux._services.base import UploadedPart
from aioflux._values.meta import OpenUpload

LISTING = b"""<?xml version='1.0' encoding='UTF-8'?>
<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>
  <Bucket>b</Bucket><NextKeyMarker>k&amp;2</NextKeyMarker>
  <NextUploadIdMarker>id2</NextUploadIdMarker><IsTruncated>true</IsTruncated>
  <Upload><Key>k 1</Key><UploadId>id1</UploadId>
    <Initiated>2026-01-31T12:00:00.250Z</Initiated></Upload>
  <Upload><Key>k&amp;2</Key><UploadId>id2</UploadId>
    <Initiated>2026-01-31T13:00:00.250+01:00</Initiated></Upload>
</ListMultipartUploadsResult>"""


def test_targets_quote_what_they_carry() -> None:
    assert multipart.part_target(b"/b/k", "i/d+=", 7) == b"/b/k?partNumber=7&uploadId=i%2Fd%2B%3D"
    assert multipart.upload_target(b"/b/k", "a&b") == b"/b/k?uploadId=a%26b"
    assert (
        multipart.list_uploads_target(b"/b", prefix="p/ ", key_marker="", id_marker="")
        == b"/b?uploads&prefix=p%2F%20"
    )
    assert (
        multipart.list_uploads_target(b"/b", prefix="", key_marker="k&", id_marker="i")
        == b"/b?uploads&prefix=&key-marker=k%26&upload-id-marker=i"
    )


def test_a_completion_names_every_part() -> None:
    body = multipart.complete_body([UploadedPart(1, '"a<&"', 5), UploadedPart(2, "b", 6)])
    root = ET.fromstring(body)
    assert [(part.findtext("PartNumber"), part.findtext("ETag")) for part in root] == [
        ("1", '"a<&"'),
        ("2", "b"),
    ]


def test_a_page_of_uploads_reports_where_the_next_begins() -> None:
    uploads, key_marker, id_marker = multipart.parse_uploads(LISTING)
    begun = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    assert uploads == [
        OpenUpload(key="k 1", upload_id="id1", initiated=begun),
        OpenUpload(key="k&2", upload_id="id2", initiated=begun),
    ]
    assert (key_marker, id_marker) == ("k&2", "id2")
    last = LISTING.replace(b"true", b"false")
    assert multipart.parse_uploads(last)[1:] == ("", "")


def test_a_page_of_uploads_that_is_cut_off_does_not_end_in_silence() -> None:
    """SeaweedFS tells the id of the last upload alone."""
    untold = LISTING.replace(b"<NextKeyMarker>k&amp;2</NextKeyMarker>", b"")
    assert multipart.parse_uploads(untold)[1:] == ("k&2", "id2")
    with pytest.raises(ValueError, match="truncated"):
        multipart.parse_uploads(
            b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
            b"</ListMultipartUploadsResult>"
        )


def test_keys_of_uploads_that_come_encoded_are_decoded() -> None:
    told = LISTING.replace(b"k 1", b"k%01+%2B").replace(b"k&amp;2", b"k%262")
    encoded = told.replace(b"<Upload>", b"<EncodingType>url</EncodingType><Upload>", 1)
    uploads, key_marker, _ = multipart.parse_uploads(encoded, is_encoded=True)
    assert ([each.key for each in uploads], key_marker) == (["k\x01 +", "k&2"], "k&2")
    # Of servers that do not know it, and where it was not asked for, they are as they stand.
    for page, is_asked in ((told, True), (encoded, False)):
        uploads, _, _ = multipart.parse_uploads(page, is_encoded=is_asked)
        assert uploads[0].key == "k%01+%2B"

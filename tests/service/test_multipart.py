"""The multipart protocol: targets, bodies and responses, by the service of S3."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime

import pytest

from aioflux import TransientError
from aioflux._services.base import PartRequest, UploadedPart, WriteRequest
from aioflux._values.meta import OpenUpload
from tests.service.s3_rig import answer, asking

LISTING = """<?xml version='1.0' encoding='UTF-8'?>
<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>
  <Bucket>b</Bucket><NextKeyMarker>p/k&amp;2</NextKeyMarker>
  <NextUploadIdMarker>id2</NextUploadIdMarker><IsTruncated>true</IsTruncated>
  <Upload><Key>p/k 1</Key><UploadId>id1</UploadId>
    <Initiated>2026-01-31T12:00:00.250Z</Initiated></Upload>
  <Upload><Key>p/k&amp;2</Key><UploadId>id2</UploadId>
    <Initiated>2026-01-31T13:00:00.250+01:00</Initiated></Upload>
</ListMultipartUploadsResult>"""
EMPTY = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
COMPLETED = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"


async def test_ids_are_quoted_in_targets() -> None:
    async with asking(answer(200, etag='"x"'), answer(204)) as (service, asked):
        await service.put_part(PartRequest("k", "i/d+=", 7, [b"1"]))
        await service.abort_upload("k", "a&b")
    assert [each.target for each in asked] == [
        "/bucket/p/k?partNumber=7&uploadId=i%2Fd%2B%3D",
        "/bucket/p/k?uploadId=a%26b",
    ]


async def test_a_completion_names_every_part() -> None:
    parts = [UploadedPart(1, '"a<&"', 5), UploadedPart(2, "b", 6)]
    async with asking(answer(200, COMPLETED), answer(200, etag='"x"')) as (service, asked):
        await service.complete_upload(WriteRequest("k"), "id", parts)
    root = ET.fromstring(asked[0].body)
    found = [(each.findtext("{*}PartNumber"), each.findtext("{*}ETag")) for each in root]
    assert found == [("1", '"a<&"'), ("2", "b")]


async def test_a_page_of_uploads_names_the_start_of_the_next() -> None:
    async with asking(answer(200, LISTING), answer(200, EMPTY)) as (service, asked):
        uploads = await service.list_uploads("k")
    initiated = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    assert uploads == [
        OpenUpload(key="k 1", upload_id="id1", initiated=initiated),
        OpenUpload(key="k&2", upload_id="id2", initiated=initiated),
    ]
    assert [each.target for each in asked] == [
        "/bucket?prefix=p%2Fk&uploads=",
        "/bucket?key-marker=p%2Fk%262&prefix=p%2Fk&upload-id-marker=id2&uploads=",
    ]


async def test_a_truncated_page_without_markers_is_malformed() -> None:
    truncated = EMPTY.replace("false", "true")
    async with asking(answer(200, truncated)) as (service, _):
        with pytest.raises(TransientError, match="truncated"):
            await service.list_uploads("")


async def test_without_a_key_marker_the_last_upload_is_the_marker() -> None:
    """SeaweedFS returns the id of the last upload alone."""
    page = LISTING.replace("<NextKeyMarker>p/k&amp;2</NextKeyMarker>", "")
    async with asking(answer(200, page), answer(200, EMPTY)) as (service, asked):
        await service.list_uploads("")
    assert "key-marker=p%2Fk%262&prefix=p%2F&upload-id-marker=id2" in asked[1].target


@pytest.mark.parametrize("is_encoded", [True, False])
async def test_encoded_keys_of_uploads_are_decoded(*, is_encoded: bool) -> None:
    """They are requested if XML cannot represent a key, but some servers ignore the request."""
    page = LISTING.replace("k 1", "k%01+%2B").replace("true", "false")
    if is_encoded:
        page = page.replace("<Upload>", "<EncodingType>url</EncodingType><Upload>", 1)
    unreadable = LISTING.replace("k 1", "k&#x1;")
    async with asking(answer(200, unreadable), answer(200, page)) as (service, asked):
        uploads = await service.list_uploads("")
    assert "encoding-type=url" in asked[1].target
    assert uploads[0].key == ("k\x01 +" if is_encoded else "k%01+%2B")

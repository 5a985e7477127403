"""Decompressive transcoding: gzip objects are served as what was compressed.

Source: cloud.google.com/storage/docs/transcoding. GCS sends the result without a
Content-Length; here it has one. Its checksums are those of the stored bytes, as on GCS.
"""

from __future__ import annotations

import gzip
import re
import zlib
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._messages import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._records import ObjectRecord

_GZIP = re.compile(r"\s*gzip\s*(?!.*;\s*q=0(\.0*)?\s*(;|$))(;|$)")


def may_stay_compressed(headers: Mapping[str, str], record: ObjectRecord) -> bool:
    """Judge whether a gzip object is served as it is stored.

    Args:
        headers: Of the request, by lower-case name.
        record: An object whose Content-Encoding is gzip.
    """
    if "no-transform" in (record.attributes.cache_control or ""):
        return True
    accepted = headers.get("accept-encoding", "").lower().split(",")
    return any(_GZIP.match(coding) for coding in accepted)


def transcoded(record: ObjectRecord, block: bytes) -> Response:
    """Answer with the decompressed object, whole: GCS ignores a range here.

    Bytes that are no gzip, whatever their Content-Encoding says, are served as they are.

    Args:
        record: An object whose Content-Encoding is gzip.
        block: Header lines of its download.
    """
    stored = record.blob.view(0, record.size)
    try:
        body = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error):
        return Response(block=block, body=stored)
    lines = block.splitlines(keepends=True)
    kept = (
        line for line in lines if not line.startswith((b"Content-Encoding:", b"Accept-Ranges:"))
    )
    headers = (
        ("Vary", "Accept-Encoding"),
        ("Warning", '214 UploadServer "gunzipped"'),
        ("x-guploader-response-body-transformations", "gunzipped"),
    )
    return Response(block=b"".join(kept), headers=headers, body=body)

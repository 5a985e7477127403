"""XML API: query parameters that name a part of a bucket or object other than its bytes.

A request for one that the server does not have must not fall through to the bucket or object
itself: `PUT ?acl` would overwrite the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError, invalid

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request

_SHARED = frozenset({"acl", "compose", "encryption", "retention", "tagging"})
_OF_OBJECTS = _SHARED | {"attributes", "legal-hold", "restore", "select", "torrent"}
_OF_UPLOADS = frozenset({"partNumber", "uploadId", "uploads"})
_OF_BUCKETS = _SHARED | {
    "accelerate",
    "analytics",
    "autoclass",
    "billing",
    "cors",
    "defaultObjectAcl",
    "delete",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "location",
    "logging",
    "metrics",
    "notification",
    "notificationConfig",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "rpo",
    "storageClass",
    "uploads",
    "versioning",
    "website",
}


def refuse_of_object(request: Request) -> None:
    """Refuse what asks for a part of an object: handlers of the object itself call this.

    Raises:
        APIError: 501, or 400 where the parameters of an upload are incomplete or out of place.
    """
    if not request.query:
        return
    _refuse(request, _OF_OBJECTS)
    misplaced = sorted(_OF_UPLOADS & request.query.keys())
    if misplaced:
        raise invalid(f"Not for this method, or not without others: {', '.join(misplaced)}")


def refuse_of_bucket(request: Request) -> None:
    """Refuse what asks for a part of a bucket: handlers of the bucket itself call this.

    Raises:
        APIError: 501.
    """
    if request.query:
        _refuse(request, _OF_BUCKETS)


def _refuse(request: Request, names: frozenset[str]) -> None:
    found = sorted(names & request.query.keys())
    if found:
        raise APIError(501, "notImplemented", f"Not implemented here: {', '.join(found)}")

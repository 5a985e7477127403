"""Schemes, accounts and keys of the benchmark servers for `s3` and `az`.

The keys are valid only for servers that the benchmarks start on this machine. `sign_in` sets them
in the environment before a contender's library is imported, so that each library finds them in its
usual way.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perf.work import Work

__all__ = [
    "ACCESS_KEY",
    "ACCOUNT",
    "ACCOUNT_KEY",
    "KINDS",
    "REGION",
    "SCHEMES",
    "SECRET_KEY",
    "connection_string",
    "sign_in",
]

SCHEMES = ("gs", "s3", "az")
KINDS = {"s3": "seaweedfs", "az": "azurite"}
"""Default server of each scheme."""
ACCESS_KEY = "AKIAAIOFLUXPERF00001"
SECRET_KEY = "a/secret+of/one/server/on/this/machine"  # noqa: S105  of local servers only
REGION = "us-east-1"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (  # Azurite's default, from its documentation
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def connection_string(url: str) -> str:
    """Return the connection string for the Azurite server at a url."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        f"BlobEndpoint={url}/{ACCOUNT};"
    )


def sign_in(work: Work) -> None:
    """Set the credentials of the server of a work in the environment."""
    if work.scheme == "s3":
        os.environ["AWS_ACCESS_KEY_ID"] = ACCESS_KEY
        os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET_KEY
        os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = REGION
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    elif work.scheme == "az":
        os.environ["AZURE_STORAGE_CONNECTION_STRING"] = connection_string(work.url)

"""How contenders find the servers of `s3` and `az`: schemes, accounts and keys.

The keys open only servers of these measurements, on this machine. They are found as those of users
are: in the environment, which `sign_in` writes before a contender's library is imported.
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
"""The server that speaks a scheme, where it is no other that the scenario asks for."""
ACCESS_KEY = "AKIAAIOFLUXPERF00001"
SECRET_KEY = "a/secret+of/one/server/on/this/machine"  # noqa: S105  it opens nothing else
REGION = "us-east-1"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (  # Azurite's own, which its documentation tells
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def connection_string(url: str) -> str:
    """Return what the clients of Azure are given for a server of these measurements."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        f"BlobEndpoint={url}/{ACCOUNT};"
    )


def sign_in(work: Work) -> None:
    """Have the keys of a work's server found in the environment."""
    if work.scheme == "s3":
        os.environ["AWS_ACCESS_KEY_ID"] = ACCESS_KEY
        os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET_KEY
        os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = REGION
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    elif work.scheme == "az":
        os.environ["AZURE_STORAGE_CONNECTION_STRING"] = connection_string(work.url)

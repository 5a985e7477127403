"""A server that speaks the JSON and XML API of Google Cloud Storage, for tests and trials."""

from aioflux.testing.gcs_server._connection import Limits
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._fault import Fault
from aioflux.testing.gcs_server._network import Network
from aioflux.testing.gcs_server._server import GCSServer
from aioflux.testing.gcs_server._stats import OperationStats

__all__ = ["APIError", "Fault", "GCSServer", "Limits", "Network", "OperationStats"]

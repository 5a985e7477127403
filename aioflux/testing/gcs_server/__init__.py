"""Emulator of Google Cloud Storage for tests: a server with its JSON and XML APIs."""

from aioflux.testing.gcs_server._app import Hook
from aioflux.testing.gcs_server._connection import Limits
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._faults import Fault
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._network import Network
from aioflux.testing.gcs_server._server import GCSServer
from aioflux.testing.gcs_server._state import State
from aioflux.testing.gcs_server._stats import OperationStats

__all__ = [
    "APIError",
    "Fault",
    "GCSServer",
    "Hook",
    "Limits",
    "Network",
    "OperationStats",
    "Request",
    "Response",
    "State",
]

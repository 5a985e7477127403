"""Options of the stores of aioflux. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.auth.credentials import AnonymousCredentials

from perf.peers._parts import ssl_context

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["store_options"]


def store_options(work: Work) -> dict[str, Any]:
    """Return the options of a store, which are defaults except for the server."""
    options: dict[str, Any] = {"endpoint_url": work.url}
    if work.ca_file:
        # With TLS, the store does not recognise an emulator, and would look for credentials.
        options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        options["ssl_context"] = ssl_context(work)
    return options

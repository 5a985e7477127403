"""What reads listings page by page, for services that do not list as the contract wants it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from aioflux._services.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.base import ListRequest, Page

__all__ = ["Lister"]

S = TypeVar("S", bound=Sender)


class Lister(ABC, Generic[S]):
    """Reads pages below a prefix; what is sorted here is kept until it is given away."""

    def __init__(self, sender: S, prefix: str, *, uri: Callable[[str], str]) -> None:
        """Take what is listed.

        Args:
            sender: Asks the service.
            prefix: What all names begin with; left out of keys.
            uri: Returns the whole uri of a key.
        """
        self._sender = sender
        self._prefix = prefix
        self._uri = uri

    @abstractmethod
    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page of `size` objects at most; see `Service.list_page`."""

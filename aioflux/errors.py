"""Every error that aioflux raises.

    AiofluxError(Exception)
    ├── StorageError                 message="", *, uri, status
    │   ├── NotFoundError            (FileNotFoundError)
    │   ├── PermissionDeniedError    (PermissionError)
    │   ├── AlreadyExistsError       (FileExistsError)   mode="create"
    │   ├── PreconditionFailedError  the object changed under the caller
    │   ├── ChecksumError            bytes received or sent do not match
    │   ├── RecordError              an object was read, but not as the records it should hold
    │   ├── UnsupportedError         the service or server cannot do this
    │   └── TransientError           attempts ran out; __cause__ is the last failure
    ├── CredentialsError
    └── CheckpointError
        ├── CheckpointNotFoundError
        └── CheckpointCorruptError

Each can be built from one message, because PyTorch re-raises a worker's error as
`type(error)(traceback)`; after `carry_fields` a StorageError keeps its fields then, too.
Each pickles with its fields, because torch.distributed.checkpoint gathers errors by pickle.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "AiofluxError",
    "AlreadyExistsError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "CredentialsError",
    "NotFoundError",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "RecordError",
    "StorageError",
    "TransientError",
    "UnsupportedError",
]

_MARK: Final = "aioflux: uri and status "
"""Begins the line of a traceback that holds the fields of its error."""


class AiofluxError(Exception):
    """Base of every error that aioflux raises."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError subclasses rebuild from args alone; fields and notes travel in the instance
        # dictionary.
        return type(self), (self.message,), self.__dict__.copy()


class StorageError(AiofluxError):
    """A storage service rejected or failed a request, or its response cannot be right.

    Attributes:
        message: The operation, its object, and what to do next.
        uri: Whole uri of the object, prefix or bucket; empty if there is none.
        status: HTTP status of the response, or None if there was none.
    """

    def __init__(self, message: str = "", *, uri: str = "", status: int | None = None) -> None:
        super().__init__(message)
        if not uri and _MARK in message:
            uri, status = _carried(message)
        self.uri = uri
        self.status = status

    def carry_fields(self) -> None:
        """Add uri and status to the traceback, from whose text another process builds the error."""
        import json  # `import aioflux` does without it

        note = _MARK + json.dumps([self.uri, self.status])
        if note not in getattr(self, "__notes__", ()):
            self.add_note(note)


def _carried(text: str) -> tuple[str, int | None]:
    """Return uri and status of the last error in a traceback."""
    import json

    notes = [line for line in text.splitlines() if line.startswith(_MARK)]
    uri, status = json.loads(notes[-1].removeprefix(_MARK)) if notes else ("", None)
    return uri, status


class NotFoundError(StorageError, FileNotFoundError):
    """No object (or bucket, or upload) has this name, or not in this generation."""


class PermissionDeniedError(StorageError, PermissionError):
    """The credentials in use may not do this."""


class AlreadyExistsError(StorageError, FileExistsError):
    """`mode="create"` met an object that exists."""


class PreconditionFailedError(StorageError):
    """The object changed under the caller: its generation is not the expected one."""


class ChecksumError(StorageError):
    """Bytes that were received or sent do not match their checksum."""


class RecordError(StorageError):
    """The bytes of an object are not valid records: torn, truncated or malformed."""


class UnsupportedError(StorageError):
    """The service or server cannot do this; the message says what to do instead."""


class TransientError(StorageError):
    """A failure that may be temporary; raised to the caller when attempts or time ran out.

    Attributes:
        retry_after_seconds: The wait that the service asked for, or None.
        num_bytes_received: Leading bytes of the body that arrived before it broke.
        generation: Generation of that body, if its headers arrived; the rest is read from it.
        maybe_done: The request may have been carried out: it was sent, and there was no response,
            or one that a gateway may have sent in place of the service.
        is_malformed: The service does not send such responses: invalid HTTP, or the page of another
            server. A few of these in a row end the retries.
    """

    def __init__(
        self,
        message: str = "",
        *,
        uri: str = "",
        status: int | None = None,
        retry_after_seconds: float | None = None,
        num_bytes_received: int = 0,
        generation: str = "",
        maybe_done: bool = False,
        is_malformed: bool = False,
    ) -> None:
        super().__init__(message, uri=uri, status=status)
        self.retry_after_seconds = retry_after_seconds
        self.num_bytes_received = num_bytes_received
        self.generation = generation
        self.maybe_done = maybe_done
        self.is_malformed = is_malformed


class CredentialsError(AiofluxError):
    """No usable credentials were found, or they could not be refreshed."""


class CheckpointError(AiofluxError):
    """A checkpoint could not be saved or loaded."""


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint, or no checkpoint of this step, exists."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint exists, but its bytes do not verify."""

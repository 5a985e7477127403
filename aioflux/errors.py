"""Every error that aioflux raises.

    AiofluxError(Exception)
    ├── StorageError                 message="", *, uri, status
    │   ├── NotFoundError            (FileNotFoundError)
    │   ├── PermissionDeniedError    (PermissionError)
    │   ├── AlreadyExistsError       (FileExistsError)   mode="create"
    │   ├── PreconditionFailedError  the object changed under the caller
    │   ├── ChecksumError            bytes received or sent do not match
    │   ├── RecordError              the bytes of an object are not valid records
    │   ├── UnsupportedError         the service or server cannot do this
    │   └── TransientError           attempts or time ran out; __cause__ is the last failure
    ├── CredentialsError
    └── CheckpointError
        ├── CheckpointNotFoundError
        └── CheckpointCorruptError

Each class can be built from one message, because PyTorch re-raises the error of a DataLoader worker
as `type(error)(traceback)`. `StorageError.carry_fields` adds the fields to this traceback. Errors
are pickled with their fields, because torch.distributed.checkpoint gathers errors by pickle.
"""

from __future__ import annotations

from typing import Any, Final, Literal

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

_FIELDS_PREFIX: Final = "aioflux: uri, status, maybe_done "
"""Beginning of the line of a traceback that contains the fields of the error."""


class AiofluxError(Exception):
    """Base of every error that aioflux raises."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses of OSError would be rebuilt from their args alone; the instance dictionary
        # contains the fields and notes.
        return type(self), (self.message,), self.__dict__.copy()


class StorageError(AiofluxError):
    """A storage service rejected a request or failed, or its response is invalid.

    Attributes:
        message: The failed operation, its object, and often advice.
        uri: Whole uri of the object, prefix or bucket; empty if not known.
        status: HTTP status of the response, or None without a response.
        maybe_done: The write may have been carried out nevertheless: the response to an attempt was
            lost, or may be from a gateway and not from the service. The message says so, too. Read
            the object before you repeat the write.
    """

    def __init__(
        self,
        message: str = "",
        *,
        uri: str = "",
        status: int | None = None,
        maybe_done: bool = False,
    ) -> None:
        super().__init__(message)
        if not uri and _FIELDS_PREFIX in message:
            uri, status, maybe_done = _parse_fields(message)
        self.uri = uri
        self.status = status
        self.maybe_done = maybe_done

    def carry_fields(self) -> None:
        """Add the fields to the traceback as a note, before the error leaves its process.

        PyTorch builds the error in the main process from the text of the traceback alone.
        """
        import json  # not imported by `import aioflux`

        note = _FIELDS_PREFIX + json.dumps([self.uri, self.status, self.maybe_done])
        if note not in getattr(self, "__notes__", ()):
            self.add_note(note)


def _parse_fields(traceback: str) -> tuple[str, int | None, bool]:
    """Return the fields of the last error in a traceback."""
    import json

    notes = [line for line in traceback.splitlines() if line.startswith(_FIELDS_PREFIX)]
    fields = json.loads(notes[-1].removeprefix(_FIELDS_PREFIX)) if notes else ("", None, False)
    return fields[0], fields[1], fields[2]


class NotFoundError(StorageError, FileNotFoundError):
    """The object, bucket or upload does not exist, or the object has another generation."""


class PermissionDeniedError(StorageError, PermissionError):
    """The credentials do not have the permission for this operation (HTTP 401 or 403)."""


class AlreadyExistsError(StorageError, FileExistsError):
    """`mode="create"` was requested for an object that already exists."""


class PreconditionFailedError(StorageError):
    """The object was changed by another writer: its generation is not the expected one."""

    @classmethod
    def of(
        cls, action: str, uri: str, why: str = "", *, status: int | None = None
    ) -> PreconditionFailedError:
        """Return the error of an action on an object: "could not {action} {uri}: {why}"."""
        reason = why or "its generation is not the expected one"
        return cls(f"could not {action} {uri}: {reason}", uri=uri, status=status)


class ChecksumError(StorageError):
    """Bytes that were received or sent do not match their checksum."""


class RecordError(StorageError):
    """The bytes of an object are not valid records: they are truncated or malformed."""


class UnsupportedError(StorageError):
    """The service or server does not support this operation; the message names an alternative."""


class TransientError(StorageError):
    """A failure that may be temporary. Callers receive it when attempts or time ran out.

    Attributes:
        retry_after_seconds: Delay that the service requested, in seconds, or None.
        num_bytes_received: Bytes of the body that were received.
        generation: Generation of the object that was being received. The next attempt reads the
            rest of the body from this generation. Empty if the received bytes are not kept.
        is_malformed: The response is not from the storage service: invalid HTTP, or a page of
            another server. Three such responses in a row end the retries.
        is_damaged: The received bytes do not match the checksum in their response.
        unconnected: "unreachable" or "unknown host" if no connection to the server was open;
            otherwise empty.
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
        is_damaged: bool = False,
        unconnected: Literal["", "unreachable", "unknown host"] = "",
    ) -> None:
        super().__init__(message, uri=uri, status=status, maybe_done=maybe_done)
        self.retry_after_seconds = retry_after_seconds
        self.num_bytes_received = num_bytes_received
        self.generation = generation
        self.is_malformed = is_malformed
        self.is_damaged = is_damaged
        self.unconnected = unconnected


class CredentialsError(AiofluxError):
    """No usable credentials were found, or the credentials could not be refreshed."""


class CheckpointError(AiofluxError):
    """A checkpoint could not be saved or loaded."""


class CheckpointNotFoundError(CheckpointError):
    """The checkpoint or the step does not exist."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint exists, but its bytes are missing or do not match their checksums."""

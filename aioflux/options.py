"""Options of `open_store`: transfers, retries, timeouts, and access to a service."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import ssl

    from aioflux._values.stats import ProgressHook

__all__ = [
    "CleanupTimeouts",
    "GCSAccess",
    "RetryPolicy",
    "S3Access",
    "StoreOptions",
    "Timeouts",
    "TransferOptions",
    "WriteAttributes",
]

MIB = 1024 * 1024


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{type(owner).__name__}.{name} must be a number, not {value!r}")
        if not value > 0 or value == math.inf:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be a finite number above 0, not {value!r}"
            )


def check_count(name: str, count: object, *, least: int = 1) -> None:
    """Raise an error that names the argument if `count` is not an int, or is below `least`."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an int, not {count!r}")
    if count < least:
        raise ValueError(f"{name} must be {least} or more, not {count!r}")


def _require_counts(owner: object, *names: str) -> None:
    for name in names:
        check_count(f"{type(owner).__name__}.{name}", getattr(owner, name))


def _require_type(owner: object, kind: type, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, kind):
            raise TypeError(
                f"{type(owner).__name__}.{name} must be a {kind.__name__}, not {value!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOptions:
    """Limits of requests and bytes in flight, sizes of ranges and parts, and verification."""

    max_in_flight: int = 64
    """Maximum number of requests that one store has in flight on one event loop; 64 by default."""
    max_in_flight_bytes: int = 256 * MIB
    """Maximum number of bytes of request and response bodies that one store has in flight on one
    event loop; 256 MiB by default. A range or part that is larger than the limit is transferred
    alone. The same limit applies to the memory of each iteration over many objects (`get_many`, a
    dataset): bytes in flight and objects that wait for the consumer add up to at most the limit
    plus one object. Each DataLoader worker has its own budget."""
    max_requests_per_second: float | None = None
    """Maximum number of requests that one store sends per second on one event loop, retries
    included; no limit by default. The workers of a DataLoader divide it among themselves. A new
    bucket serves about 5,000 reads a second, and rejects the others: in a job of hundreds of ranks,
    pass 4,500 divided by the number of ranks to the dataset. Not for the store of a `Checkpointer`,
    whose ranks share the rate by themselves."""
    range_size_bytes: int = 16 * MIB
    """Size of the parallel ranges of a large object that is read, in bytes; 16 MiB by default."""
    part_size_bytes: int = 16 * MIB
    """Size of the parts of an object that is written, in bytes; 16 MiB by default. Services accept
    5 MiB to 5 GiB. The size of the next parts doubles after every 900 parts, because an upload has
    at most 10,000 parts."""
    max_buffered_bytes: int = 64 * MIB
    """Maximum number of bytes that one writer or reader buffers; 64 MiB by default, which is four
    parts. When the buffer of a writer is full, `write` waits until a part was sent. A reader
    prefetches ranges up to this size, unless `read_ahead_bytes` is given. At least
    `part_size_bytes`. If the parts of a very large object are larger than this, one part is
    buffered."""
    num_loops: int = 1
    """Number of event loops that send requests with large bodies; 1 by default, the loop of the
    caller, and 128 at most. With more, ranges and parts of 1 MiB and more are spread over the
    caller's loop and `num_loops - 1` threads, which all stores of the process share, so that a
    store uses several processors. All limits apply to the sum. Blocking credentials are called on
    each loop; asynchronous ones belong to one loop, and are rejected."""
    verify: bool = True
    """Compute and compare the checksums of received and sent bytes; True by default."""
    verify_ranges: bool = False
    """Read bytes that no checksum covers, such as a range, twice, and a third time if the two
    copies differ; False by default. The second copy is requested at the same time if
    `max_in_flight` allows it, and half of `max_in_flight_bytes` is for second copies. TLS detects
    bytes that change on the way; over plain http, only a second read does. Without effect if
    `verify` is False."""

    def __post_init__(self) -> None:
        _require_counts(
            self,
            "max_in_flight",
            "max_in_flight_bytes",
            "range_size_bytes",
            "part_size_bytes",
            "max_buffered_bytes",
            "num_loops",
        )
        if self.num_loops > 128:
            raise ValueError(f"TransferOptions.num_loops must be 128 or less, not {self.num_loops}")
        _require_type(self, bool, "verify")
        if self.max_requests_per_second is not None:
            _require_positive(self, "max_requests_per_second")
        if not isinstance(self.verify_ranges, bool):
            raise ValueError(  # noqa: TRY004  also for the words of earlier versions
                "TransferOptions.verify_ranges must be True or False (read each range twice, or "
                f"once), not {self.verify_ranges!r}"
            )
        if not 5 * MIB <= self.part_size_bytes <= 5 * 1024 * MIB:
            raise ValueError(
                "TransferOptions.part_size_bytes must be between 5 MiB and 5 GiB, the limits of "
                f"multipart uploads, not {self.part_size_bytes!r}"
            )
        if self.max_buffered_bytes < self.part_size_bytes:
            raise ValueError(
                "TransferOptions.max_buffered_bytes must be at least part_size_bytes "
                f"({self.part_size_bytes}), not {self.max_buffered_bytes!r}; set both"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Attempts, delays and deadline of one request.

    Delays have full jitter. A Retry-After header of the service is a lower bound of the delay.
    """

    max_attempts: int = 8
    """Maximum number of attempts of one request, the first included; 8 by default. 1 switches
    retries off. Otherwise an attempt that received some bytes of the body starts the count again:
    the next attempt resumes after these bytes, until the deadline. After three malformed responses
    in a row the request fails, because a storage service does not send malformed responses."""
    initial_seconds: float = 0.25
    """Upper bound of the first delay, in seconds; 0.25 by default."""
    multiplier: float = 2.0
    """Factor between the bounds of two successive delays; 2.0 by default."""
    max_seconds: float = 32.0
    """Upper bound of every delay, in seconds; 32 by default. Only a Retry-After header can make a
    delay longer."""
    deadline_seconds: float = 300.0
    """Maximum time for all attempts of one request and their delays, in seconds; 300 by default."""
    connect_deadline_seconds: float | None = None
    """Maximum time for attempts of which none has opened a connection, in seconds; by default
    `deadline_seconds`. `max_attempts` does not count attempts without a connection, unless it is 1.
    If the name of the host does not exist, the request fails after three attempts."""
    budget_retries: int = 100
    """Size of the retry budget: retries that the requests of one store may send in a burst on one
    event loop; 100 by default. Every five requests that succeed add one retry to the budget. When
    the budget is empty, a retry waits; it is not dropped."""
    budget_per_second: float = 10.0
    """Retries that are added to the budget each second; 10 by default."""

    def __post_init__(self) -> None:
        _require_counts(self, "max_attempts", "budget_retries")
        _require_positive(
            self,
            "initial_seconds",
            "multiplier",
            "max_seconds",
            "deadline_seconds",
            "budget_per_second",
            *(() if self.connect_deadline_seconds is None else ("connect_deadline_seconds",)),
        )
        if not 1 <= self.multiplier < math.inf:
            raise ValueError(
                f"RetryPolicy.multiplier must be a finite number of 1 or more, not "
                f"{self.multiplier!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanupTimeouts:
    """Limits of the time for aborting uploads and deleting temporary objects, which are billed.

    `Store.clean` removes uploads and objects that were not cleaned up in time.
    """

    total_seconds: float = 30.0
    """Maximum time for one clean-up, in seconds; 30 by default. It continues after its caller was
    cancelled. After Ctrl-C a blocking call waits at most this long for the clean-up."""
    abort_wait_seconds: float = 0.8
    """Maximum time that a cancelled or interrupted writer waits for the abort of its upload, in
    seconds; 0.8 by default, which is enough for a service that responds. After this time the abort
    continues in the background."""
    composite_wait_seconds: float = 3.0
    """Maximum time that an iteration waits for the deletion of its composites when its consumer
    stops early, in seconds; 3 by default. The default is longer than that of `abort_wait_seconds`,
    because the process may exit next, and composites would remain."""
    interrupted_seconds: float = 2.0
    """Maximum time for clean-up when the event loop is closed or the process exits, and for closing
    a store whose `async with` block was cancelled or interrupted, in seconds; 2 by default."""
    close_seconds: float = 5.0
    """Maximum time that closing a store waits for running clean-up, in seconds; 5 by default."""

    def __post_init__(self) -> None:
        _require_positive(self, *(field.name for field in fields(self)))


def longest_cleanup(timeouts: Iterable[CleanupTimeouts]) -> CleanupTimeouts:
    """Return the maximum of each field; the defaults if `timeouts` is empty."""
    values = list(timeouts) or [CleanupTimeouts()]
    names = [field.name for field in fields(CleanupTimeouts)]
    return CleanupTimeouts(
        **{name: max(getattr(value, name) for value in values) for name in names}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Timeouts of one attempt, and of clean-up."""

    connect_seconds: float = 10.0
    """Maximum time for name lookup, TCP connect, proxy and TLS handshake together, in seconds; 10
    by default."""
    progress_seconds: float = 5.0
    """Longest time without progress while a body is received or sent, in seconds; 5 by default.
    The response to a read must also begin within this time. One byte is progress; with TLS, sent
    bytes count in blocks of up to 256 KiB. On Linux a byte counts as sent when the kernel of the
    server, or of the proxy, has acknowledged it. On other systems it counts when the local kernel
    has buffered it, and the kernel may buffer some MiB."""
    idle_seconds: float = 60.0
    """Longest time without any byte outside a body, in seconds; 60 by default. It limits the wait
    for the response to a write whose body was sent, unless the operation has a longer limit of its
    own. An unused connection in the pool is closed after this time."""
    slow_seconds: float | None = 30.0
    """Duration from which a successful attempt is logged as slow, in seconds, by the logger
    `aioflux.requests` at INFO; 30 by default, None for never. A range or a part of 16 MiB takes
    that long at 0.6 MB/s; what makes no progress at all fails sooner."""
    cleanup: CleanupTimeouts = CleanupTimeouts()
    """Timeouts of aborting uploads and deleting temporary objects."""

    def __post_init__(self) -> None:
        names = ("connect_seconds", "progress_seconds", "idle_seconds")
        _require_positive(self, *names, *(() if self.slow_seconds is None else ("slow_seconds",)))
        if not isinstance(self.cleanup, CleanupTimeouts):
            raise TypeError(f"Timeouts.cleanup must be CleanupTimeouts(...), not {self.cleanup!r}")


class StoreOptions(TypedDict, total=False):
    """Keywords of `open_store`, to annotate functions with `**options: Unpack[StoreOptions]`."""

    transfer: TransferOptions | None
    retry: RetryPolicy | None
    timeouts: Timeouts | None
    credentials: Any
    endpoint_url: str | None
    ssl_context: ssl.SSLContext | None
    progress: ProgressHook | None


class WriteAttributes(TypedDict, total=False):
    """Attributes that are keywords of `Store.put`, `open_writer` and `compose`.

    Functions can be annotated with `**attributes: Unpack[WriteAttributes]`.
    """

    content_type: str
    content_encoding: str
    content_disposition: str
    cache_control: str
    storage_class: str
    metadata: Mapping[str, str] | None


ANONYMOUS = "anonymous"
"""Value of `credentials=` for public buckets and containers."""

_ADDRESSINGS = ("auto", "path", "virtual")


def is_asynchronous(credentials: Any) -> bool:
    """Return whether credentials are a coroutine function, or have asynchronous methods."""
    provider = credentials.credentials if isinstance(credentials, _Access) else credentials
    methods = (provider, type(provider).__call__, getattr(provider, "get_token", None))
    return any(map(inspect.iscoroutinefunction, methods))


def carries_secret(credentials: Any) -> bool:
    """Return whether credentials may contain a secret, so that they must not be pickled.

    A function of a module contains none, because it is pickled as its name, and neither does the
    path of a file. Other text, credential objects, lambdas and nested functions may contain one.
    """
    provider = credentials.credentials if isinstance(credentials, _Access) else credentials
    if isinstance(provider, str | os.PathLike):
        return provider != ANONYMOUS and not os.path.isfile(provider)
    return provider is not None and "." in getattr(provider, "__qualname__", ".")


class _Access:
    """Base of the access settings of a service, which may contain a secret in `credentials`."""

    __slots__ = ()
    credentials: Any

    def __repr__(self) -> str:
        settings: list[str] = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                # Without the secret, but different for other credentials: fsspec uses the repr of
                # its arguments as the key of its cache of filesystems.
                is_secret = field.name == "credentials"
                text = f"<{type(value).__name__} at {id(value):#x}>" if is_secret else repr(value)
                settings.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __reduce__(self) -> tuple[Any, ...]:
        if carries_secret(self):
            raise TypeError(
                f"{self!r} holds credentials and cannot be pickled; pass a "
                "module-level function that returns them, or rely on the default credentials"
            )
        settings = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return partial(type(self), **settings), ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GCSAccess(_Access):
    """Access to Google Cloud Storage: `open_store("gs://...", credentials=GCSAccess(...))`.

    It can be pickled if `credentials` is None or a function of a module.
    """

    credentials: Any = None
    """Other value of `credentials=` for `gs://`. None, the default, means Application Default
    Credentials."""
    user_project: str = ""
    """Project that is billed for the requests, which buckets with requester pays need. The
    credentials need the permission `serviceusage.services.use` in it. By default the project of the
    bucket is billed."""
    kms_key: str = ""
    """Cloud KMS key with which written, composed and copied objects are encrypted,
    `projects/.../locations/.../keyRings/.../cryptoKeys/...`; by default the key of the bucket."""

    def __post_init__(self) -> None:
        _require_type(self, str, "user_project", "kms_key")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Access(_Access):
    """Access to S3, for `open_store("s3://...", credentials=S3Access(...))`.

    It can be pickled if `credentials` is None or a function of a module.

    Settings that are not given are read with the first request, from the same variables and files
    as in botocore, even if keys are given or `anonymous` is True:

    * The endpoint: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the `services` section that the profile
      names, then `endpoint_url` of the profile. None of them is read if
      AWS_IGNORE_CONFIGURED_ENDPOINT_URLS or the profile's `ignore_configured_endpoint_urls` is
      true.
    * The variant of the endpoint of AWS: AWS_USE_FIPS_ENDPOINT and AWS_USE_DUALSTACK_ENDPOINT, or
      `use_fips_endpoint` and `use_dualstack_endpoint` of the profile. Without effect if an endpoint
      is set.
    * The trusted authorities: AWS_CA_BUNDLE or `ca_bundle` of the profile, unless `ssl_context` is
      given.

    The ARN of an access point is not accepted as a bucket; its alias is.
    """

    region: str = ""
    """Region of the bucket. An empty text means the first of AWS_REGION, AWS_DEFAULT_REGION and the
    profile's region that is set; if none of them is set, the region that S3 returns for the bucket,
    or `us-east-1` if an endpoint is set."""
    profile: str = ""
    """Profile of ~/.aws/config and ~/.aws/credentials. An empty text means the profile in
    AWS_PROFILE, or `default`."""
    credentials: Any = None
    """botocore credentials, a session of botocore or boto3, or a function that returns botocore
    credentials or `(access_key, secret_key[, token])`, or an awaitable of these. The result of the
    function is used for 5 s, or until the service rejects the keys as expired. A function that is
    not a coroutine function is called in a thread. None, the default, means the credentials that
    botocore finds (environment, profiles, SSO, web identity, assumed roles, containers, instance
    metadata)."""
    anonymous: bool = False
    """Send requests without a signature, for public buckets; False by default."""
    checksums: bool = True
    """Send and request CRC32C checksums; True by default. Set False for servers that do not support
    them: the MD5 of the bytes is then compared with the ETag, if the ETag is an MD5."""
    requester_pays: bool = False
    """Bill the requester, not the bucket's owner, for the requests; False by default."""
    kms_key: str = ""
    """KMS key with which written and copied objects are encrypted (SSE-KMS): its id, its ARN, or an
    alias such as `alias/aws/s3`. By default objects are encrypted as the bucket says."""
    require_conditions: bool = True
    """Raise UnsupportedError for `mode="create"` and `if_generation_match` on a server that ignores
    these conditions; True by default. If False, a RuntimeWarning is issued once, and two writers
    that create one object at the same time may both succeed. On servers other than AWS, the first
    conditional write of a process to a bucket tries the conditions, with about eight requests on a
    temporary object."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Position of the bucket in urls: "path", or "virtual" for the host name. "auto", the default,
    means the `addressing_style` of the profile, if it is one of these; otherwise the host name on
    AWS if the name of the bucket allows it, and the path elsewhere."""

    def __post_init__(self) -> None:
        if self.addressing not in _ADDRESSINGS:
            raise ValueError(
                f"S3Access.addressing must be one of {', '.join(_ADDRESSINGS)}, not "
                f"{self.addressing!r}"
            )
        _require_type(self, bool, "anonymous", "checksums", "requester_pays", "require_conditions")
        _require_type(self, str, "region", "profile", "kms_key")
        if self.anonymous and (self.credentials is not None or self.profile):
            raise ValueError("S3Access(anonymous=True) takes neither credentials nor a profile")
        if self.anonymous and (self.requester_pays or self.kms_key):
            name = "requester_pays=True" if self.requester_pays else "kms_key=..."
            raise ValueError(f"S3Access({name}) needs signed requests, not anonymous")
        if self.credentials is not None and self.profile:
            raise ValueError("S3Access takes credentials or a profile, not both")


def as_gcs_access(credentials: Any) -> GCSAccess:
    """Return the access that `credentials=` of `gs://` means."""
    is_access = isinstance(credentials, GCSAccess)
    return credentials if is_access else GCSAccess(credentials=credentials)


def as_s3_access(credentials: Any) -> S3Access:
    """Return the access that `credentials=` of `s3://` means."""
    if isinstance(credentials, S3Access):
        return credentials
    if isinstance(credentials, str) and credentials == ANONYMOUS:
        return S3Access(anonymous=True)
    return S3Access(credentials=credentials)

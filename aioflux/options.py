"""Options of a store: transfers, retries, timeouts, and access to S3. They hold no secret."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from aioflux._values.stats import ProgressHook

__all__ = [
    "CleanupTimeouts",
    "RetryPolicy",
    "S3Access",
    "StoreOptions",
    "Timeouts",
    "TransferOptions",
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


def _require_whole(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, float):
            raise TypeError(f"{type(owner).__name__}.{name} must be an int, not {value!r}")
    _require_positive(owner, *names)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOptions:
    """Numbers of requests and bytes in flight, and sizes of ranges and parts."""

    max_in_flight: int = 64
    """Requests in flight in one store; 64 by default."""
    max_in_flight_bytes: int = 256 * MIB
    """Bytes of bodies in flight in one store, in bytes; 256 MiB by default. One range or part is
    always let through. It also bounds the memory of each iteration over many objects, such
    as `get_many` or that of a dataset: bytes in flight and objects that wait for the consumer take
    up to this together, plus one object. Each DataLoader worker has a budget of its own."""
    range_size_bytes: int = 16 * MIB
    """Size of the ranges in which a larger object is read, in bytes; 16 MiB by default."""
    part_size_bytes: int = 16 * MIB
    """Size of the parts in which an object is written, in bytes; 16 MiB by default. Services take
    5 MiB to 5 GiB."""
    max_buffered_bytes: int = 64 * MIB
    """Bytes that one writer may hold before `write` waits, in bytes; 64 MiB by default, which is
    four parts."""
    verify: bool = True
    """Checksums of received and sent bytes are compared; True by default."""
    verify_ranges: Literal["auto", "always", "never"] = "auto"
    """Verification of a range that is not a whole object, for which services return no checksum;
    "auto" by default: over plain http it is read twice at the same time, and a third time if the
    two differ; over TLS, which detects changed bytes itself, and from files once. "always" reads
    twice everywhere, "never" nowhere. Without effect if `verify` is False."""

    def __post_init__(self) -> None:
        _require_whole(
            self,
            "max_in_flight",
            "max_in_flight_bytes",
            "range_size_bytes",
            "part_size_bytes",
            "max_buffered_bytes",
        )
        if self.verify_ranges not in {"auto", "always", "never"}:
            raise ValueError(
                'TransferOptions.verify_ranges must be "auto", "always" or "never", not '
                f"{self.verify_ranges!r}"
            )
        if not 5 * MIB <= self.part_size_bytes <= 5 * 1024 * MIB:
            raise ValueError(
                "TransferOptions.part_size_bytes must be between 5 MiB and 5 GiB, the limits of "
                f"multipart uploads, not {self.part_size_bytes!r}"
            )
        if self.max_buffered_bytes < self.part_size_bytes:
            raise ValueError(
                "TransferOptions.max_buffered_bytes must hold at least one part of "
                f"{self.part_size_bytes} bytes, not {self.max_buffered_bytes!r}; set both"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Attempts, delays and deadline of one request.

    Delays have full jitter; a Retry-After from the service wins.
    """

    max_attempts: int = 8
    """Attempts of one request, the first included; 8 by default. 1 switches retries off. One that
    received bytes of a body does not count: the next one resumes there, until the deadline. Three
    malformed responses in a row end a request in any case: the service sends none."""
    initial_seconds: float = 0.25
    """Upper bound of the first delay, in seconds; 0.25 by default."""
    multiplier: float = 2.0
    """Growth of that bound from one attempt to the next; 2.0 by default."""
    max_seconds: float = 32.0
    """Largest bound of a delay, in seconds; 32 by default."""
    deadline_seconds: float = 300.0
    """Time that all attempts of one request may take together, in seconds; 300 by default."""
    budget_retries: int = 100
    """Retries that all requests of one store may send at once; 100 by default. Every five requests
    that succeed allow one more. A retry above the budget is not dropped, it waits."""
    budget_per_second: float = 10.0
    """Retries in each second that are allowed whatever else happens; 10 by default."""

    def __post_init__(self) -> None:
        _require_whole(self, "max_attempts", "budget_retries")
        _require_positive(
            self,
            "initial_seconds",
            "multiplier",
            "max_seconds",
            "deadline_seconds",
            "budget_per_second",
        )
        if not 1 <= self.multiplier < math.inf:
            raise ValueError(
                f"RetryPolicy.multiplier must be a finite number of 1 or more, not "
                f"{self.multiplier!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanupTimeouts:
    """Time for aborting uploads and deleting temporary objects, which would be billed otherwise.

    What is left when a time has passed is removed by `Store.clean`.
    """

    total_seconds: float = 30.0
    """Time that one clean-up may take, also after its caller was cancelled, in seconds; 30 by
    default. After Ctrl-C a blocking call waits this long for it."""
    abort_wait_seconds: float = 0.8
    """Time that a cancelled or interrupted writer waits for the abort of its upload, which then
    goes on by itself, in seconds; 0.8 by default, in which a service that answers is done."""
    composite_wait_seconds: float = 3.0
    """Time that a composed read which ends early waits for the deletion of its composites, in
    seconds; 3 by default. It is longer, as the process may end next."""
    interrupted_seconds: float = 2.0
    """Time for clean-up when its event loop or the process ends, and for closing a store whose
    `async with` block was cancelled or interrupted, in seconds; 2 by default."""
    close_seconds: float = 5.0
    """Time that closing a store waits for clean-up that is under way, in seconds; 5 by default."""

    def __post_init__(self) -> None:
        _require_positive(self, *(each.name for each in fields(self)))


def longest_cleanup(times: Iterable[CleanupTimeouts]) -> CleanupTimeouts:
    """Return the longest of each time; the defaults if there are none."""
    every = list(times) or [CleanupTimeouts()]
    names = [each.name for each in fields(CleanupTimeouts)]
    return CleanupTimeouts(**{name: max(getattr(each, name) for each in every) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time that one attempt waits for the network, and that clean-up may take."""

    connect_seconds: float = 10.0
    """Time for name lookup, connection and TLS handshake, in seconds; 10 by default."""
    progress_seconds: float = 5.0
    """Time in which at least one byte of a response body must arrive or of a request body must
    leave, in seconds; 5 by default. On Linux a byte has left when the server's system has received
    it; elsewhere, and through a proxy, when this system has taken it, which it does of some MiB at
    once."""
    idle_seconds: float = 60.0
    """Time that a connection may be silent outside a body, in seconds; 60 by default: while a
    service works on a write whose whole body has left, and unused in the pool, which then closes
    it. The response to a read must begin within `progress_seconds`."""
    cleanup: CleanupTimeouts = CleanupTimeouts()
    """Time for aborting uploads and deleting temporary objects."""

    def __post_init__(self) -> None:
        _require_positive(self, "connect_seconds", "progress_seconds", "idle_seconds")
        if not isinstance(self.cleanup, CleanupTimeouts):
            raise TypeError(f"Timeouts.cleanup must be CleanupTimeouts(...), not {self.cleanup!r}")


class StoreOptions(TypedDict, total=False):
    """Keywords of `open_store`, to be passed on: `**options: Unpack[StoreOptions]`."""

    transfer: TransferOptions | None
    retry: RetryPolicy | None
    timeouts: Timeouts | None
    credentials: Any
    endpoint_url: str | None
    ssl_context: ssl.SSLContext | None
    progress: ProgressHook | None


ANONYMOUS = "anonymous"
"""As `credentials=` of `gs://` and `az://`: for public buckets and containers."""

_ADDRESSINGS = ("auto", "path", "virtual")


def carries_secret(credentials: Any) -> bool:
    """Return whether credentials may contain a secret, so that they do not pickle.

    A function of a module pickles as its name, settings as they are; others may contain one.
    """
    provider = credentials.credentials if isinstance(credentials, S3Access) else credentials
    if isinstance(provider, str) and provider == ANONYMOUS:
        return False
    return provider is not None and "." in getattr(provider, "__qualname__", ".")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Access:
    """Access to S3, for `open_store("s3://...", credentials=S3Access(...))`.

    It pickles if `credentials` is None or a function of a module.

    Missing settings are read with the first request, as botocore reads them, also if keys are given
    or none are needed: the endpoint from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile's
    `services` section and its `endpoint_url`, unless AWS_IGNORE_CONFIGURED_ENDPOINT_URLS or
    `ignore_configured_endpoint_urls` is true; AWS_USE_FIPS_ENDPOINT and AWS_USE_DUALSTACK_ENDPOINT
    or `use_fips_endpoint` and `use_dualstack_endpoint`, without effect if there is an endpoint;
    and AWS_CA_BUNDLE or `ca_bundle`, unless `ssl_context` is given. ARNs of access points are
    refused: their alias is a bucket name.
    """

    region: str = ""
    """Region of the bucket. Empty: AWS_REGION, AWS_DEFAULT_REGION, the profile's; or else that
    which S3 returns for the bucket; `us-east-1` at an endpoint of your own."""
    profile: str = ""
    """Profile of ~/.aws/config and ~/.aws/credentials; empty for AWS_PROFILE, or the default."""
    credentials: Any = None
    """botocore credentials, a session of botocore or boto3, or a function that returns credentials
    or `(access_key, secret_key[, token])`, or an awaitable of them, and is called again after
    5 s of use and when the service rejects them as expired, in a thread if it is no coroutine
    function. None: those that botocore finds (environment, profiles, SSO, web identity, assumed
    roles, containers, instance metadata)."""
    anonymous: bool = False
    """Nothing is signed, for public buckets; False by default."""
    checksums: bool = True
    """CRC32C is sent and requested; True by default. False for servers that do not support it:
    entity tags are compared then, if they are an MD5."""
    requester_pays: bool = False
    """The requester pays, not the bucket's owner; False by default."""
    require_conditions: bool = True
    """`mode="create"` and `if_generation_match` raise UnsupportedError on an endpoint that ignores
    them; True by default. False: a RuntimeWarning says so once, and of two writers that write one
    object at the same time both succeed. On endpoints other than AWS, the first conditional write
    of a process probes the server by some eight requests on a temporary object."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path of urls or in their host name; "auto" by default: in the host name on AWS
    if the bucket's name allows that, in the path at an endpoint of your own."""

    def __post_init__(self) -> None:
        if self.addressing not in _ADDRESSINGS:
            raise ValueError(
                f"S3Access.addressing must be one of {', '.join(_ADDRESSINGS)}, not "
                f"{self.addressing!r}"
            )
        for name in ("anonymous", "checksums", "requester_pays", "require_conditions"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"S3Access.{name} must be a bool, not {getattr(self, name)!r}")
        for name in ("region", "profile"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"S3Access.{name} must be a str, not {getattr(self, name)!r}")
        if self.anonymous and (self.credentials is not None or self.profile):
            raise ValueError("S3Access(anonymous=True) takes neither credentials nor a profile")
        if self.anonymous and self.requester_pays:
            raise ValueError("S3Access(requester_pays=True) must sign: someone has to pay")
        if self.credentials is not None and self.profile:
            raise ValueError("S3Access takes credentials or a profile, not both")

    def __repr__(self) -> str:
        settings: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                # Credentials by identity alone: fsspec caches filesystems by such texts.
                is_secret = each.name == "credentials"
                text = f"<{type(value).__name__} at {id(value):#x}>" if is_secret else repr(value)
                settings.append(f"{each.name}={text}")
        return f"{type(self).__name__}({', '.join(settings)})"

    def __reduce__(self) -> tuple[Any, ...]:
        if carries_secret(self):
            raise TypeError(
                f"{self!r} holds credentials and does not pickle; pass a "
                "module-level function that returns them, or rely on what botocore finds"
            )
        return _restore_access, ({each.name: getattr(self, each.name) for each in fields(self)},)


def _restore_access(settings: dict[str, Any]) -> S3Access:
    return S3Access(**settings)

"""How a service is asked: whose credentials, where, and who pays. Settings, never secrets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["ANONYMOUS", "S3Access", "carries_secret"]

ANONYMOUS = "anonymous"
"""As `credentials=` of `gs://` and `az://`: for public buckets and containers."""

_ADDRESSINGS = ("auto", "path", "virtual")


def carries_secret(credentials: Any) -> bool:
    """Tell whether what was given as credentials may hold a secret, so that it does not pickle.

    A function of a module pickles as its name, settings as they are; anything else could hold one.
    """
    provider = credentials.credentials if isinstance(credentials, S3Access) else credentials
    if isinstance(provider, str) and provider == ANONYMOUS:
        return False
    return provider is not None and "." in getattr(provider, "__qualname__", ".")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Access:
    """How S3 is asked, for `open_store("s3://...", credentials=S3Access(...))`.

    It pickles where `credentials` is None or a function of a module.

    What is not given is read with the first request, as botocore reads it, also where keys are
    given or none are needed: the endpoint from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile's
    `services` section and its `endpoint_url`, unless AWS_IGNORE_CONFIGURED_ENDPOINT_URLS or
    `ignore_configured_endpoint_urls` is true; AWS_USE_FIPS_ENDPOINT and AWS_USE_DUALSTACK_ENDPOINT
    or `use_fips_endpoint` and `use_dualstack_endpoint`, without effect where there is an endpoint;
    and AWS_CA_BUNDLE or `ca_bundle`, unless `ssl_context` is given. ARNs of access points are
    refused: their alias is a bucket name.
    """

    region: str = ""
    """Region of the bucket. Empty: AWS_REGION, AWS_DEFAULT_REGION, the profile's; where these name
    none, it is asked of the bucket itself; `us-east-1` at an endpoint of your own."""
    profile: str = ""
    """Profile of ~/.aws/config and ~/.aws/credentials; empty for AWS_PROFILE, or the default."""
    credentials: Any = None
    """botocore credentials, a session of botocore or boto3, or a function that returns credentials
    or `(access_key, secret_key[, token])`, or an awaitable of them, and is called again after
    5 s of use and where the service says that they have ended, in a thread if it is no coroutine
    function. None: what botocore finds (environment, profiles, SSO, web identity, assumed roles,
    containers, instance metadata)."""
    anonymous: bool = False
    """Nothing is signed, for public buckets; False by default."""
    checksums: bool = True
    """CRC32C is sent and asked for; True by default. False for servers that do not know it, or get
    it wrong: entity tags are compared then, where they are an MD5."""
    requester_pays: bool = False
    """Requests are paid by who asks, not by the bucket's owner; False by default."""
    require_conditions: bool = True
    """`mode="create"` and `if_generation_match` are refused with UnsupportedError by an endpoint
    that ignores them; True by default. False: a RuntimeWarning says so once, and of two writers
    that write one object at the same time both succeed. On endpoints that are not AWS's, the first
    conditional write of a process tries what the server compares, by some eight requests on a
    temporary object."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket stands in the path or in the name of the host; "auto" by default: in the
    host on AWS where its name can stand there, in the path at an endpoint of your own."""

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
            raise ValueError("S3Access(requester_pays=True) must sign: somebody has to pay")
        if self.credentials is not None and self.profile:
            raise ValueError("S3Access takes credentials or a profile, not both")

    def __repr__(self) -> str:
        told: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                # Of credentials only which they are: filesystems are kept by such texts.
                is_secret = each.name == "credentials"
                text = f"<{type(value).__name__} at {id(value):#x}>" if is_secret else repr(value)
                told.append(f"{each.name}={text}")
        return f"{type(self).__name__}({', '.join(told)})"

    def __reduce__(self) -> tuple[Any, ...]:
        if carries_secret(self):
            raise TypeError(
                f"{self!r} does not pickle: credentials are never carried along; pass a "
                "module-level function that returns them, or rely on what botocore finds"
            )
        return _restore_access, ({each.name: getattr(self, each.name) for each in fields(self)},)


def _restore_access(settings: dict[str, Any]) -> S3Access:
    return S3Access(**settings)

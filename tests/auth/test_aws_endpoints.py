"""The endpoint of S3 by environment and profile is that of boto3."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import boto3
import botocore.session
import pytest
from botocore.loaders import Loader

import aioflux
from aioflux import S3Access
from aioflux._services.base import ReadRequest
from tests.http.authority import Authority
from tests.http.scripted import answering, serving
from tests.service.opening import open_service
from tests.service.s3_rig import asking, hello

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from botocore.awsrequest import AWSPreparedRequest

    Config = Callable[[str], int]

REGION = {"AWS_DEFAULT_REGION": "us-west-2"}
SERVICES = "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://services:9\n"
BOTH = SERVICES.replace("[default]\n", "[default]\nendpoint_url = http://profile:8\n")
FIPS = {"AWS_USE_FIPS_ENDPOINT": "true"}
DUALSTACK = {"AWS_USE_DUALSTACK_ENDPOINT": "true"}

CASES: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, ""),
    "fips": (FIPS, ""),
    "fips, in capitals": ({"AWS_USE_FIPS_ENDPOINT": "TRUE"}, ""),
    "fips, no boolean": ({"AWS_USE_FIPS_ENDPOINT": "1"}, ""),
    "fips, gov": ({**FIPS, "AWS_DEFAULT_REGION": "us-gov-west-1"}, ""),
    "dual-stack": (DUALSTACK, ""),
    "dual-stack, china": ({**DUALSTACK, "AWS_DEFAULT_REGION": "cn-north-1"}, ""),
    "fips and dual-stack": ({**FIPS, **DUALSTACK}, ""),
    "profile": ({}, "[default]\nuse_fips_endpoint = true\nuse_dualstack_endpoint = true\n"),
    "nested": ({}, "[default]\ns3 =\n  use_dualstack_endpoint = true\n"),
    "environment over nested": (DUALSTACK, "[default]\ns3 =\n  use_dualstack_endpoint = false\n"),
    "environment over profile": (
        {"AWS_USE_FIPS_ENDPOINT": "false"},
        "[default]\nuse_fips_endpoint = true\n",
    ),
    "services": ({}, SERVICES),
    "services over profile": ({}, BOTH),
    "environment over services": ({"AWS_ENDPOINT_URL": "http://environment:7"}, BOTH),
    "another service": ({}, BOTH.replace("s3 =", "sqs =")),
    "ignored": ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, BOTH),
    "ignored environment": (
        {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ENDPOINT_URL_S3": "http://x:1"},
        "",
    ),
    "ignored by profile": (
        {"AWS_ENDPOINT_URL_S3": "http://x:1"},
        "[default]\nignore_configured_endpoint_urls = true\n",
    ),
    "endpoint and fips": ({**FIPS, "AWS_ENDPOINT_URL_S3": "http://x:1"}, ""),
    "endpoint and dual-stack": ({**DUALSTACK, "AWS_ENDPOINT_URL_S3": "http://x:1"}, ""),
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Writes the file of profiles, in an environment without other settings."""
    for name in tuple(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return (tmp_path / "config").write_text


LOADER = Loader()
"""Reads the models of botocore once: for each session, that would be most of the time."""


def asked_by_boto3(bucket: str) -> str:
    """Return the url, without its key, to which boto3 sends a read."""
    urls: list[str] = []

    def keep(request: AWSPreparedRequest, **_: Any) -> NoReturn:
        urls.append(request.url)
        raise KeyboardInterrupt

    core = botocore.session.Session()
    core.register_component("data_loader", LOADER)
    session = boto3.session.Session("AKID", "s", botocore_session=core)
    client = session.client("s3")
    client.meta.events.register("before-send.s3.GetObject", keep)
    with pytest.raises(KeyboardInterrupt):
        client.get_object(Bucket=bucket, Key="k")
    client.close()
    return urls[0].removesuffix("/k")


async def asked_by_us(bucket: str, credentials: Any = None) -> str:
    service = open_service(f"s3://{bucket}/", credentials=credentials)
    site = await service._sender._open_endpoint("read", "k")
    await service.aclose()
    return f"{site.origin.scheme}://{site.origin.authority.decode()}{site.root.decode()}"


KEYS = {
    "found": None,
    "given": S3Access(credentials=lambda: ("AKID", "s")),
    "anonymous": S3Access(anonymous=True),
}


@pytest.mark.parametrize("bucket", ["data-1", "with.dot"])
@pytest.mark.parametrize("case", CASES)
async def test_the_endpoint_is_that_of_boto3(
    config: Config, monkeypatch: pytest.MonkeyPatch, case: str, bucket: str
) -> None:
    """Also for stores with credentials=, or without keys."""
    environment, text = CASES[case]
    config(text)
    for name, value in {**REGION, **environment}.items():
        monkeypatch.setenv(name, value)
    expected = asked_by_boto3(bucket)
    asked = {name: await asked_by_us(bucket, keys) for name, keys in KEYS.items()}
    assert asked == dict.fromkeys(KEYS, expected)


async def test_an_endpoint_argument_precedes_all(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(BOTH)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://environment:7")
    service = open_service("s3://data-1/", endpoint_url="http://given:6")
    site = await service._sender._open_endpoint("read", "k")
    assert site.origin.host == "given"
    await service.aclose()


async def test_missing_services_are_named(config: Config) -> None:
    config("[default]\nregion = us-west-2\nservices = lost\n")
    with pytest.raises(ValueError, match=r"services.*'lost'"):
        await asked_by_us("data-1")


async def test_a_region_without_fips_endpoints_is_rejected(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "cn-north-1")
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    with pytest.raises(ValueError, match=r"AWS_USE_FIPS_ENDPOINT.*cn-north-1"):
        await asked_by_us("data-1")


async def test_the_region_of_a_bucket_is_found_at_the_same_kind_of_endpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    service = open_service("s3://data-1/", credentials=S3Access(anonymous=True))
    hosts: list[str] = []

    class Pool:
        async def request(self, origin: Any, *_: Any, **__: Any) -> NoReturn:
            hosts.append(origin.host)
            raise RuntimeError

        async def aclose(self) -> None:
            pass

    service._sender.pool = Pool()  # type: ignore[assignment]
    with pytest.raises(aioflux.StorageError):
        await service.head("k")
    assert hosts == ["data-1.s3-fips.dualstack.us-east-1.amazonaws.com"]
    await service.aclose()


@pytest.mark.parametrize("where", ["environment", "profile"])
async def test_the_authority_of_a_bundle_is_trusted(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    authority = Authority(tmp_path)
    if where == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.file))
    else:
        config(f"[default]\nca_bundle = {authority.file}\n")
    async with serving(answering(hello()), tls=authority.server_context()) as (_, origin):
        url = f"https://localhost:{origin.port}"
        service = open_service("s3://data-1/", endpoint_url=url, credentials=KEYS["given"])
        assert bytes((await service.get(ReadRequest("a"))).data) == b"hello"
        await service.aclose()


async def test_a_bundle_that_cannot_be_read_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "lost.pem"))
    async with asking(hello()) as (service, _):
        with pytest.raises(ValueError, match=r"AWS_CA_BUNDLE.*lost\.pem"):
            await service.get(ReadRequest("a"))


@pytest.mark.parametrize(
    "arn",
    [
        "arn:aws:s3:us-west-2:123456789012:accesspoint/mine",
        "arn:aws:s3:us-west-2:123456789012:accesspoint:mine",
        "arn:aws-cn:s3-object-lambda:cn-north-1:123456789012:accesspoint/mine",
        "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
    ],
)
def test_an_arn_is_not_a_bucket(arn: str) -> None:
    with pytest.raises(ValueError, match="alias"):
        aioflux.open_store(f"s3://{arn}/prefix")

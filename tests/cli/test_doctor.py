"""`doctor`: each way in which access to a bucket fails, its line and its advice; and no secret."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from aioflux.cli import _doctor
from aioflux.cli._arguments import parse_arguments
from aioflux.cli._settings import settings
from aioflux.testing import GCSServer
from perf.servers._ports import free_ports
from tests.cli.conftest import FAR_SECONDS, PROGRAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers.azurite import Azurite
    from tests.servers.conditions import ConditionsGateway
    from tests.servers.moto import Moto
    from tests.servers.seaweedfs import SeaweedFS

SECRET = "planted/secret+0123456789abcdefghijklmnopq"
TOKEN = "ya29.planted-access-token-0123456789"
EMAIL = "trainer@project.iam.gserviceaccount.com"


class Examination:
    """Findings of one run, by their names."""

    def __init__(self, ended: subprocess.CompletedProcess[str]) -> None:
        self.status = ended.returncode
        self.err = ended.stderr
        rows = [json.loads(line) for line in ended.stdout.splitlines()]
        self.rows = {row["name"]: row for row in rows}
        assert len(self.rows) == len(rows)

    def kind(self, name: str) -> str:
        return self.rows[name]["kind"]

    def text(self, name: str) -> str:
        return f"{self.rows[name]['text']}; {self.rows[name]['advice']}"

    def not_ok(self) -> dict[str, str]:
        return {name: row["kind"] for name, row in self.rows.items() if row["kind"] != "ok"}


@pytest.fixture
def process(tmp_path: Path, monkeypatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command with no credentials but the ones given as variables."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)

    def run(*words: object, **variables: object) -> subprocess.CompletedProcess[str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        command = [*PROGRAM, *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=FAR_SECONDS, check=False, cwd=tmp_path
        )

    return run


@pytest.fixture
def examine(process) -> Callable[..., Examination]:
    return lambda *words, **variables: Examination(process("doctor", "--json", *words, **variables))


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("b",)) as server:
        server.put("b", "p/a", b"data")
        yield server


class OddServer(BaseHTTPRequestHandler):
    """Responds with a shifted clock, and with an access token to each POST."""

    shift_seconds = 0.0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        token = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(token).encode())

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + self.shift_seconds, usegmt=True)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def odd_server(request) -> Iterator[str]:
    handler = type("Handler", (OddServer,), {"shift_seconds": getattr(request, "param", 0.0)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# --- gs ------------------------------------------------------------------------------------------


def test_everything_works(examine, server: GCSServer) -> None:
    found = examine("--write", "gs://b/p", STORAGE_EMULATOR_HOST=server.url)
    assert (found.status, found.err) == (0, "")
    assert found.not_ok() == {"clock": "skipped"}  # the server sends no Date
    assert list(found.rows) == [
        *("installation", "credentials", "endpoint", "dns", "connection", "clock", "round trip"),
        *("list", "read", "write", "create if absent", "delete if same", "delete"),
    ]
    assert found.text("endpoint").startswith(f"{server.url} (STORAGE_EMULATOR_HOST)")
    assert found.text("credentials").startswith("anonymous")
    assert found.text("connection").startswith("HTTP 405, without TLS")
    assert found.text("write").startswith("gs://b/p/.aioflux-uploads/")
    assert server.keys("b") == ["p/a"]


def test_nothing_is_written_without_the_option(process, server: GCSServer) -> None:
    ended = process("doctor", "gs://b/p/a", STORAGE_EMULATOR_HOST=server.url)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert lines[-2] == "ok       read: the first byte of gs://b/p/a"
    assert lines[-1].startswith("skipped  write: not tried; --write")
    names = set(server.stats.operations)
    assert not [name for name in names if name.endswith((".insert", ".delete"))]


@pytest.mark.parametrize(
    ("operation", "name", "permission", "after"),
    [
        ("objects.list", "list", "storage.objects.list", {"read": "ok", "write": "ok"}),
        ("objects.media", "read", "storage.objects.get", {"list": "ok", "write": "ok"}),
        ("xml.objects.insert", "write", "storage.objects.create", {"list": "ok", "read": "ok"}),
        ("xml.objects.delete", "delete", "storage.objects.delete", {"write": "ok"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_permission(
    examine, server: GCSServer, operation: str, name: str, permission: str, after: dict[str, str]
) -> None:
    server.faults.add(operation, status=403)
    found = examine("--write", "gs://b/p/a", STORAGE_EMULATOR_HOST=server.url)
    assert found.status == 1
    assert found.kind(name) == "failed"
    assert f"need {permission}" in found.text(name)
    assert {each: found.kind(each) for each in after} == after


def test_a_bucket_that_does_not_exist(examine, server: GCSServer) -> None:
    found = examine("gs://nosuch", STORAGE_EMULATOR_HOST=server.url)
    assert (found.status, found.kind("list"), found.kind("read")) == (1, "failed", "skipped")
    assert "the bucket does not exist" in found.text("list")


@pytest.mark.parametrize(
    ("odd_server", "kind", "text"),
    [
        (0.0, "ok", "the clock of the server"),
        (300.0, "warning", "behind the clock of the server; set the clock"),
        (-3600.0, "failed", "ahead of the clock of the server; set the clock"),
    ],
    indirect=["odd_server"],
)
def test_a_clock_that_is_wrong(examine, odd_server: str, kind: str, text: str) -> None:
    found = examine("gs://b", "--endpoint-url", odd_server)
    assert found.kind("clock") == kind
    assert text in found.text("clock")
    assert found.kind("list") == "failed"  # not skipped, but this is no storage service
    assert "--endpoint-url" in found.text("endpoint")


def test_nothing_listens(examine) -> None:
    [port] = free_ports(1)
    found = examine("gs://b", "--endpoint-url", f"http://127.0.0.1:{port}")
    assert found.status == 1
    assert found.not_ok() == {"connection": "failed", "objects": "skipped"}
    assert "Connection refused; check host and port" in found.text("connection")


def test_a_host_that_does_not_exist(examine) -> None:
    found = examine("gs://b", STORAGE_EMULATOR_HOST="http://nonexistent.invalid")
    assert found.status == 1
    assert found.not_ok() == {"dns": "failed", "objects": "skipped"}
    assert "check the spelling of the endpoint" in found.text("dns")


@pytest.fixture
def key_file(odd_server: str, tmp_path: Path) -> Path:
    """A key file of a service account that does not exist."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path / "key.json"
    info = {"type": "service_account", "client_email": EMAIL, "private_key_id": SECRET}
    info |= {"private_key": pem.decode(), "token_uri": f"{odd_server}/token"}
    path.write_text(json.dumps(info))
    return path


def test_tls_and_a_key_file(process, examine, key_file: Path) -> None:
    with GCSServer(buckets=("b",), tls=True) as server:
        words = ("gs://b", "--endpoint-url", server.url)
        variables = {"GOOGLE_APPLICATION_CREDENTIALS": key_file}
        found = examine(*words, **variables)
        assert (found.status, found.kind("connection")) == (1, "failed")
        assert "SSL_CERT_FILE" in found.text("connection")
        found = examine(*words, **variables, SSL_CERT_FILE=server.ca_file)
        assert found.status == 0
        assert found.text("connection").startswith("HTTP 405, TLSv1.3, certificate until ")
        identity = found.text("credentials")
        assert identity.startswith(f"{key_file} file via the GOOGLE_APPLICATION_CREDENTIALS ")
        assert f", of {EMAIL}, valid until 20" in identity
        ended = process("--debug", "doctor", *words)
        for secret in (SECRET, TOKEN, *json.loads(key_file.read_text())["private_key"].split()):
            assert len(secret) < 12 or secret not in ended.stdout + ended.stderr


# --- s3 and az -----------------------------------------------------------------------------------


def test_s3_works_and_a_wrong_secret_does_not(examine, process, seaweedfs: SeaweedFS) -> None:
    variables = {
        "AWS_ENDPOINT_URL_S3": seaweedfs.url,
        "AWS_ACCESS_KEY_ID": seaweedfs.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweedfs.secret_key,
    }
    seaweedfs.door().put_object(Bucket="bucket", Key="doctor/a", Body=b"data")
    found = examine("--write", "s3://bucket/doctor", **variables)
    assert (found.status, found.not_ok()) == (0, {})
    short = f"{seaweedfs.access_key[:4]}...{seaweedfs.access_key[-4:]}"
    assert found.text("credentials").startswith(f"AWS_ACCESS_KEY_ID, key {short}")
    assert "(AWS_ENDPOINT_URL_S3)" in found.text("endpoint")
    kept = seaweedfs.door().list_objects_v2(Bucket="bucket", Prefix="doctor/")
    assert [each["Key"] for each in kept["Contents"]] == ["doctor/a"]

    ended = process("--debug", "doctor", "s3://bucket/doctor", AWS_SECRET_ACCESS_KEY=SECRET)
    assert ended.returncode == 1
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("failed   list: ")]
    assert "s3:ListBucket" in line
    assert not {SECRET, seaweedfs.secret_key, seaweedfs.access_key} & set(
        (ended.stdout + ended.stderr).replace("'", " ").split()
    )
    assert SECRET[:12] not in ended.stdout + ended.stderr


def test_a_server_that_ignores_conditions_is_a_warning(
    examine, moto: Moto, ignoring_server: ConditionsGateway
) -> None:
    variables = {
        "AWS_ENDPOINT_URL": ignoring_server.url,
        "AWS_ACCESS_KEY_ID": moto.access_key,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    found = examine("--write", "s3://bucket/doctor/", **variables)
    assert found.status == 0
    ignored = {"create if absent": "warning", "delete if same": "warning"}
    assert {name: found.kind(name) for name in ignored} == ignored
    assert "the server ignores the condition" in found.text("create if absent")
    assert found.kind("delete") == "ok"


def test_no_credentials(examine, moto: Moto) -> None:
    found = examine("s3://bucket", AWS_ENDPOINT_URL_S3=moto.url)
    assert found.status == 1
    assert found.not_ok() == {"credentials": "failed", "objects": "skipped"}
    assert "set AWS_ACCESS_KEY_ID" in found.text("credentials")
    found = examine("s3://bucket", "--anonymous", "--endpoint-url", moto.url)
    assert found.text("credentials").startswith("anonymous")
    assert found.kind("connection") == "ok"


def test_azure(examine, process, azurite: Azurite) -> None:
    text = f"AccountName={azurite.account};AccountKey={azurite.key};"
    text += f"BlobEndpoint={azurite.url}/{azurite.account}"
    uri = f"az://{azurite.account}/container/doctor"
    found = examine("--write", uri, AZURE_STORAGE_CONNECTION_STRING=text)
    assert (found.status, found.kind("delete")) == (0, "ok")
    identity = "account key of AZURE_STORAGE_CONNECTION_STRING"
    assert found.text("credentials").startswith(identity)
    assert azurite.key not in process("--debug", "doctor", uri).stdout
    wrong = text.replace(azurite.key, "cGxhbnRlZC1rZXktb2YtdGhlLXRlc3Qtb25seQ==")
    ended = process("--debug", "doctor", uri, AZURE_STORAGE_CONNECTION_STRING=wrong)
    assert ended.returncode == 1
    assert "Storage Blob Data Reader" in ended.stdout
    assert "cGxhbnRlZC1r" not in ended.stdout + ended.stderr


def test_a_proxy_is_named_without_its_password(process) -> None:
    [port] = free_ports(1)
    ended = process(
        *("--debug", "doctor", "gs://b", "--anonymous"),
        HTTPS_PROXY=f"http://user:{SECRET.replace('/', '%2F')}@127.0.0.1:{port}",
    )
    assert ended.returncode == 1
    assert f"through the proxy http://127.0.0.1:{port} (HTTPS_PROXY)" in ended.stdout
    assert "failed   connection: " in ended.stdout
    assert "0123456789abc" not in ended.stdout + ended.stderr


# --- file, installation, judgements --------------------------------------------------------------


def test_a_directory(examine, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "a b").write_bytes(b"data")
    found = examine("--write", root)
    assert (found.status, found.not_ok()) == (0, {})
    assert f" free in {root}, " in found.text("directory")
    assert found.text("read").endswith("/data/a b; ")
    assert [each.name for each in root.iterdir()] == ["a b"]
    assert examine(root / "none" / "x").kind("read") == "skipped"


def test_another_project_of_this_name(examine, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "aioflux-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aioflux\nVersion: 9.8.7\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}", prepend=":")
    found = examine(tmp_path)
    assert (found.status, found.kind("installation")) == (0, "warning")
    assert "the distribution aioflux 9.8.7, another project" in found.text("installation")
    assert "pip uninstall aioflux" in found.text("installation")


VERSIONS = dict.fromkeys(("aioflux", "aioflux-storage", "botocore", "azure-identity"), "")
VERSIONS |= {"Python": "3.11", "uvloop": "1", "aiohttp": "2", "torch": ""}


@pytest.mark.parametrize(
    ("changed", "scheme", "kinds", "text"),
    [
        ({}, "gs", ["ok"], "in /root; Python 3.11, uvloop 1, aiohttp 2, torch missing"),
        ({}, "s3", ["ok", "warning"], "pip install 'aioflux-storage[s3]'"),
        ({"botocore": "1"}, "s3", ["ok"], ""),
        ({}, "az", ["ok", "warning"], "azure-identity is missing"),
        ({"aioflux-storage": "0.0.0"}, "file", ["warning"], "pip has installed"),
    ],
)
def test_installations(changed: dict[str, str], scheme: str, kinds: list[str], text: str) -> None:
    found = list(_doctor.judge_installation(VERSIONS | changed, "/root", scheme))
    assert [each.kind for each in found] == kinds
    assert text in " ".join(map(_doctor.format_line, found))


def test_credentials_that_have_expired() -> None:
    assert _doctor.judge_credentials("x", 100.0, now=200.0).kind == "failed"
    assert _doctor.judge_credentials("x", 300.0, now=200.0).kind == "ok"
    assert _doctor.judge_credentials("x", None, now=200.0).text == "x"


@pytest.mark.parametrize(
    ("uri", "url", "host", "variables", "source"),
    [
        ("gs://b", None, "storage.googleapis.com", {}, "the default"),
        ("gs://b", "http://e", "e", {}, "--endpoint-url"),
        ("s3://b", None, "e.example", {"AWS_ENDPOINT_URL": "http://e.example"}, "AWS_ENDPOINT_URL"),
        ("s3://b", None, "e.example", {}, "the AWS profile"),
        ("s3://b", None, "b.s3.eu-west-1.amazonaws.com", {}, "the default"),
    ],
)
def test_the_source_of_an_endpoint(
    monkeypatch: Any, uri: str, url: str | None, host: str, variables: dict[str, str], source: str
) -> None:
    monkeypatch.setattr(settings, "endpoint_url", url or "")
    [argument] = parse_arguments([uri])
    assert _doctor.endpoint_source(argument, host, variables) == source


def test_a_line_has_no_control_characters() -> None:
    finding: Any = _doctor.Finding("ok", "list", "found \x1b[2J\nx", "do\n")
    assert _doctor.format_line(finding) == r"ok       list: found \x1b[2J\nx; do\n"

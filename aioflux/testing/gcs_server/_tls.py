"""TLS certificates of a server: loads given files, or makes a new certificate authority."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_LIFETIME = datetime.timedelta(days=30)
_LEEWAY = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of a TLS server, in PEM format."""

    certificate_file: Path
    key_file: Path
    ca_file: Path
    """Certificate that clients must trust."""

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self.certificate_file, self.key_file)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return an SSL context with which a client trusts only this server."""
        return ssl.create_default_context(cafile=str(self.ca_file))


def make_certificates(directory: Path, hosts: Iterable[str]) -> Certificates:
    """Make a certificate authority and a server certificate, valid for 30 days.

    Args:
        directory: Directory in which to write the files.
        hosts: Host names and addresses of the server.

    Raises:
        ModuleNotFoundError: The package `cryptography` is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ModuleNotFoundError as exc:
        message = "tls=True needs the package cryptography: install it, or pass the paths of a "
        raise ModuleNotFoundError(message + "certificate and its key as `tls`") from exc
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = _name("aioflux test authority"), _name("aioflux test server")
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    signer = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    authority = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signing_usage(), critical=True)
        .add_extension(signer, critical=False)
    )
    server = (
        _builder(name, ca_name, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(list(map(_general_name, hosts))), critical=False)
        .add_extension(usage, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False
        )
    )
    return _write(directory, authority, server, ca_key, key)


def _write(
    directory: Path,
    authority: x509.CertificateBuilder,
    server: x509.CertificateBuilder,
    ca_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
) -> Certificates:
    from cryptography.hazmat.primitives import hashes, serialization

    pem = serialization.Encoding.PEM
    paths = Certificates(directory / "server.pem", directory / "server.key", directory / "ca.pem")
    paths.ca_file.write_bytes(authority.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    paths.certificate_file.write_bytes(server.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8
    paths.key_file.touch(mode=0o600)
    paths.key_file.write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return paths


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LEEWAY)
        .not_valid_after(now + _LIFETIME)
    )


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signing_usage() -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )

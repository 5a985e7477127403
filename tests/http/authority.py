"""A certificate authority for servers of the tests."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Authority:
    """A certificate authority of our own, and a certificate for localhost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aioflux test authority")])
        self._ca = self._issue(name, name, key, key, ca=True)
        leaf_key = ec.generate_private_key(ec.SECP256R1())
        leaf = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        certificate = self._issue(leaf, name, leaf_key, key, ca=False)
        pem = serialization.Encoding.PEM
        (folder / "ca.pem").write_bytes(self._ca.public_bytes(pem))
        (folder / "leaf.pem").write_bytes(
            certificate.public_bytes(pem)
            + leaf_key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def server_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._folder / "leaf.pem")
        return context

    @property
    def file(self) -> Path:
        """The authority's own certificate."""
        return self._folder / "ca.pem"

    @property
    def leaf_file(self) -> Path:
        """The certificate for localhost, and its key."""
        return self._folder / "leaf.pem"

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.file)

    @staticmethod
    def _issue(subject, issuer, key, issuer_key, *, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        addresses = map(ipaddress.ip_address, ("127.0.0.1", "::1"))
        names = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
        # OpenSSL's strict verification, the default since Python 3.13, needs the identifiers and
        # the key usage of an authority.
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        own_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        usage = dict.fromkeys(USAGES, False) | {"key_cert_sign": ca, "digital_signature": not ca}
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(own_key, critical=False)
            .add_extension(issued_by, critical=False)
            .sign(issuer_key, hashes.SHA256())
        )

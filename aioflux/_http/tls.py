"""How servers are verified where the caller says nothing, and what to say of one that fails."""

from __future__ import annotations

import ssl

__all__ = ["default_context", "distrust"]


def default_context(ca_file: str = "") -> ssl.SSLContext:
    """Make the settings for TLS: certificates and host names are verified.

    Args:
        ca_file: File of the authorities that are trusted instead of the system's.

    Environment:
        SSL_CERT_FILE, SSL_CERT_DIR: Authorities that are trusted instead of the system's; OpenSSL
            reads both, here and so for all requests of a store.

    Raises:
        OSError: The file cannot be read, or holds no certificates.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


def distrust(where: str, exc: BaseException) -> str:
    """Say that a certificate was refused, and what to do about it."""
    reason = getattr(exc, "verify_message", "") or str(exc)
    return (
        f"the certificate of {where} was refused ({reason}); pass ssl_context= with the authority "
        "that signed it, or name that authority's file in SSL_CERT_FILE"
    )

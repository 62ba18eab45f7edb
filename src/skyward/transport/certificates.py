"""A certificate authority for each pool; its key lives in the client's memory and nowhere else."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from skyward.transport.link import tune

__all__ = ["Authority", "Identity", "context", "secure"]


@dataclass(frozen=True)
class Identity:
    """A certificate with its key, and the authority that both sides trust, as PEM text."""

    ca: str
    cert: str
    key: str

    def __repr__(self) -> str:
        return "<Identity ***>"


class Authority:
    """Issues certificates for one pool."""

    def __init__(self, pool: str, days: int = 31) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        self._x509, self._hashes, self._serialization, self._ec = x509, hashes, serialization, ec
        self._common_name = NameOID.COMMON_NAME
        now = datetime.datetime.now(datetime.UTC)
        # back-dated, so that clocks which differ by hours still agree that it is valid
        self._from, self._until = now - datetime.timedelta(days=1), now + datetime.timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = self._named(pool)
        self._cert = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._cert.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, name: str) -> Identity:
        """A certificate for one party of the pool: a node, the scheduler, the client."""
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        cert = (
            self._builder(self._named(name), key.public_key())
            .add_extension(self._x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                self._x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, self._hashes.SHA256())
        )
        encoding, form = self._serialization.Encoding.PEM, self._serialization.PrivateFormat.PKCS8
        private = key.private_bytes(encoding, form, self._serialization.NoEncryption())
        return Identity(self.pem, cert.public_bytes(encoding).decode(), private.decode())

    def _named(self, name: str) -> Any:
        return self._x509.Name([self._x509.NameAttribute(self._common_name, name)])

    def _builder(self, subject: Any, public_key: Any) -> Any:
        return (
            self._x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(self._x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self._until)
        )


def context(identity: Identity, *, server: bool) -> ssl.SSLContext:
    """A TLS context that accepts certificates of this pool only, on either side."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.sslsocket_class = _Socket
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # nodes are reached through tunnels; the certificate says who it is, not the name
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=identity.ca)
    # the ssl module takes keys from files only: one in memory, which no other process sees and nobody can leave behind
    fd = os.memfd_create("skyward-key")
    try:
        os.write(fd, (identity.cert + identity.key).encode())
        made.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return made


def secure(sock: socket.socket, context: ssl.SSLContext, timeout: float) -> ssl.SSLSocket:
    """Makes the TLS connection of a client over a socket; closes the socket if that fails."""
    try:
        sock.settimeout(timeout)
        tune(sock)
        return context.wrap_socket(sock)
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError) as exc:
        sock.close()
        raise ConnectionRefusedError("nothing listens there any more") from exc
    except BaseException:
        sock.close()
        raise


class _Socket(ssl.SSLSocket):
    """A TLS socket that says as other sockets do that it has no data, no room, or has ended."""

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0

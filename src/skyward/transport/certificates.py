"""A certificate authority for each pool; its key is only in the client's memory.

A certificate names the role of its owner: the client, or one node with its number.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

from skyward.transport.link import tune
from skyward.transport.roles import CLIENT, node_role

__all__ = ["Authority", "Identity", "PoolCertificates", "WrongPeer", "context", "role_of", "secure"]

_DAY = 86_400.0
_YEAR = 366 * _DAY
_LONGEST = 20 * _YEAR  # what a date can say is limited


@dataclass(frozen=True)
class Identity:
    ca: str
    cert: str
    key: str

    def __repr__(self) -> str:
        return "<Identity ***>"


class WrongPeer(ConnectionError):
    """The peer belongs to the pool, but is not the one that was called."""


class Authority:
    """Its certificates are valid for `ttl` seconds and a day."""

    def __init__(self, pool: str, ttl: float) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        self._x509, self._hashes, self._serialization, self._ec = x509, hashes, serialization, ec
        self._common_name, self._usage = NameOID.COMMON_NAME, ExtendedKeyUsageOID
        self.lifetime = min(ttl, _LONGEST) + _DAY
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = self._named(pool)
        self._cert = (
            self._builder(self._name, self._key.public_key(), self.lifetime + _YEAR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._cert.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, role: str) -> Identity:
        """For `CLIENT`, which only connects, or for a `node_role`."""
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        usage = [self._usage.CLIENT_AUTH] if role == CLIENT else [self._usage.CLIENT_AUTH, self._usage.SERVER_AUTH]
        cert = (
            self._builder(self._named(role), key.public_key(), self.lifetime)
            .add_extension(self._x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(self._x509.ExtendedKeyUsage(usage), critical=True)
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

    def _builder(self, subject: Any, public_key: Any, seconds: float) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        return (
            self._x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(self._x509.random_serial_number())
            # back-dated, so that clocks which differ by hours still agree that it is valid
            .not_valid_before(now - datetime.timedelta(seconds=_DAY))
            .not_valid_after(now + datetime.timedelta(seconds=seconds))
        )


def context(identity: Identity, *, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.sslsocket_class = _Socket
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # nodes are reached through tunnels; the certificate says who it is, not the name
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=identity.ca)
    _load(made, (identity.cert + identity.key).encode())
    return made


def role_of(sock: Any) -> str:
    certificate: dict[str, Any] = sock.getpeercert() or {}
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return names[0] if len(names) == 1 else ""


def secure(sock: socket.socket, context: ssl.SSLContext, timeout: float, role: str) -> ssl.SSLSocket:
    """TLS over a client's socket, which is closed if that fails or the peer has another `role`."""
    try:
        sock.settimeout(timeout)
        tune(sock)
        made = context.wrap_socket(sock)
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError) as exc:
        sock.close()
        raise ConnectionRefusedError("nothing listens there any more") from exc
    except BaseException:
        sock.close()
        raise
    if (found := role_of(made)) != role:
        made.close()
        raise WrongPeer(f"what answers there is {found!r} of this pool and not {role!r}")
    return made


def _load(made: ssl.SSLContext, pem: bytes) -> None:
    if hasattr(os, "memfd_create"):  # a file in memory, which no other process sees and nobody can leave behind
        fd = os.memfd_create("skyward-key")
        try:
            os.write(fd, pem)
            made.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return
    import tempfile

    fd, path = tempfile.mkstemp(prefix="skyward-")  # of mode 0600
    try:
        os.write(fd, pem)
        made.load_cert_chain(path)
    finally:
        os.close(fd)
        os.unlink(path)


class _Socket(ssl.SSLSocket):
    """A TLS socket that reports no data, no room and the end as others do."""

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


class PoolCertificates:
    def __init__(self, pool: str, ttl: float) -> None:
        self.authority = Authority(pool, ttl)
        self._tls: tuple[ssl.SSLContext, float] | None = None  # with the time when it is made again
        self.client()

    def client(self) -> ssl.SSLContext:
        """With a fresh certificate: a pool may live longer than one is valid."""
        now = time.monotonic()
        if self._tls is None or now > self._tls[1]:
            identity = self.authority.issue(CLIENT)
            self._tls = context(identity, server=False), now + self.authority.lifetime / 2
        return self._tls[0]

    def of_node(self, node: int) -> dict[str, str]:
        return vars(self.authority.issue(node_role(node)))

"""The authority of a pool: who is let in, over what, and where the keys are not."""

from __future__ import annotations

import pickle
import socket
import ssl
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.transport import certificates
from skyward.transport.certificates import Authority, context


def shake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[str | None, bytes]:
    """A handshake over loopback and one byte each way; returns the protocol and what the client heard."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            raw, _ = listener.accept()
            with server.wrap_socket(raw, server_side=True) as sock:
                sock.sendall(b"hello" if sock.recv(1) == b"x" else b"")

        with ThreadPoolExecutor(1) as threads:
            served = threads.submit(serve)
            try:
                with socket.create_connection(listener.getsockname(), 5) as raw, client.wrap_socket(raw) as sock:
                    sock.sendall(b"x")
                    heard = sock.recv(10)
                    version = sock.version()
            finally:
                error = served.exception(60)
        if error is not None:
            raise error
        return version, heard


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority("ours")


@pytest.fixture(scope="module")
def others() -> Authority:
    return Authority("others")


def test_two_members_of_a_pool_talk_over_tls_1_3(ours: Authority) -> None:
    client = context(ours.issue("client"), server=False)
    server = context(ours.issue("node-0"), server=True)
    assert shake(client, server) == ("TLSv1.3", b"hello")


def test_a_server_refuses_a_member_of_another_pool(ours: Authority, others: Authority) -> None:
    stranger = context(others.issue("client"), server=False)
    stranger.load_verify_locations(cadata=ours.pem)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(stranger, context(ours.issue("node-0"), server=True))


def test_a_client_refuses_a_server_of_another_pool(ours: Authority, others: Authority) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(context(ours.issue("client"), server=False), context(others.issue("node-0"), server=True))


def test_a_server_refuses_who_has_no_certificate(ours: Authority) -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.load_verify_locations(cadata=ours.pem)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(nobody, context(ours.issue("node-0"), server=True))


def test_an_older_protocol_is_refused(ours: Authority) -> None:
    old = context(ours.issue("client"), server=False)
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(old, context(ours.issue("node-0"), server=True))


def test_a_member_cannot_vouch_for_others(ours: Authority) -> None:
    """Only the authority issues: a node's certificate is none of an authority."""
    from cryptography import x509

    member = x509.load_pem_x509_certificate(ours.issue("node-0").cert.encode())
    constraints = member.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca
    top = x509.load_pem_x509_certificate(ours.pem.encode())
    assert top.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    lifetime = top.not_valid_after_utc - top.not_valid_before_utc
    assert lifetime.days <= 60


def test_every_member_has_a_key_of_its_own(ours: Authority, others: Authority) -> None:
    made = [ours.issue("node-0"), ours.issue("node-0"), others.issue("node-0")]
    assert len({identity.key for identity in made}) == 3
    assert made[0].ca == made[1].ca == ours.pem
    assert ours.pem != others.pem


def test_no_key_stays_on_disk(ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    identity = ours.issue("client")
    context(identity, server=True)
    context(identity, server=False)
    Authority("another")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_broken_leaves_nothing_on_disk_either(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ssl.SSLError):
        context(certificates.Identity(ours.pem, "no certificate", "no key"), server=True)
    assert list(tmp_path.iterdir()) == []


def test_an_identity_does_not_show_its_key(ours: Authority) -> None:
    identity = ours.issue("client")
    assert "KEY" not in repr(identity)
    assert "KEY" not in f"{[identity]} {identity!s}"
    assert "BEGIN PRIVATE KEY" in identity.key


def test_the_authority_itself_cannot_be_sent_anywhere(ours: Authority) -> None:
    """Its key lives in the client's memory and nowhere else."""
    with pytest.raises(TypeError):
        pickle.dumps(ours)


@pytest.mark.parametrize("name", ["p", "a-b_c.d", "x" * 63])
def test_any_name_of_a_pool_will_do(name: str) -> None:
    assert Authority(name).issue("node-0").cert.startswith("-----BEGIN CERTIFICATE")

"""The authority of a pool: who is let in, over what, and where the keys are not."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import ssl
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.transport import certificates
from skyward.transport.certificates import Authority, WrongPeer, context, role_of, secure


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
    return Authority("ours", 3600)


@pytest.fixture(scope="module")
def others() -> Authority:
    return Authority("others", 3600)


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


@pytest.mark.parametrize("ttl", [1.0, 3600.0, 7 * 86_400.0, 1e15])
def test_a_certificate_expires_a_day_after_the_time_to_live(ttl: float) -> None:
    """SEC-4: and it is valid for clocks that are a day late."""
    from cryptography import x509

    authority, now = Authority("ttl", ttl), datetime.datetime.now(datetime.UTC)
    made = x509.load_pem_x509_certificate(authority.issue("node-0").cert.encode())
    day = datetime.timedelta(days=1)
    assert abs(made.not_valid_before_utc - (now - day)) < datetime.timedelta(seconds=60)
    if ttl < 1e9:
        until = now + datetime.timedelta(seconds=ttl) + day
        assert abs(made.not_valid_after_utc - until) < datetime.timedelta(seconds=60)
    top = x509.load_pem_x509_certificate(authority.pem.encode())
    assert top.not_valid_after_utc > made.not_valid_after_utc  # machines are replaced, so a pool can live longer


def test_an_expired_certificate_is_refused() -> None:
    """SEC-4, row 24."""
    authority = Authority("past", 60)
    server = context(authority.issue("node-0"), server=True)
    authority.lifetime = -1.0
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(context(authority.issue("client"), server=False), server)


def test_a_client_cannot_answer_as_a_node(ours: Authority) -> None:
    """SEC-4: its certificate is for connecting only."""
    node = context(ours.issue("node-1"), server=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(node, context(ours.issue("client"), server=True))


def met(ours: Authority, answers: str, called: str) -> str:
    """Connects to whoever has the certificate `answers`, and expects `called` there; returns whom the server saw."""
    server = context(ours.issue(answers), server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> str:
            raw, _ = listener.accept()
            with server.wrap_socket(raw, server_side=True) as sock:
                return role_of(sock)

        seen = threads.submit(serve)
        raw = socket.create_connection(listener.getsockname(), 5)
        try:
            secure(raw, context(ours.issue("client"), server=False), 30, called).close()
        finally:
            assert raw.fileno() == -1
            seen.exception(60)
        return seen.result()


def test_both_sides_know_the_role_of_the_other(ours: Authority) -> None:
    assert met(ours, "node-12", "node-12") == "client"


@pytest.mark.parametrize("answers", ["node-1", "node-11", "scheduler"])
def test_another_node_than_the_one_that_was_called_is_not_talked_to(ours: Authority, answers: str) -> None:
    """SEC-4: neither by the client nor by nodes among each other."""
    with pytest.raises(WrongPeer, match=f"{answers}.*not 'node-12'"):
        met(ours, answers, "node-12")


def test_a_context_is_made_without_files_in_memory_too(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has none; the file is there for a moment, for its owner only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    modes: list[int] = []
    real = ssl.SSLContext.load_cert_chain

    def load(self: ssl.SSLContext, path: str) -> None:
        modes.append(os.stat(path).st_mode & 0o777)
        real(self, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)
    made = context(ours.issue("client"), server=False), context(ours.issue("node-0"), server=True)
    assert shake(*made) == ("TLSv1.3", b"hello")
    with pytest.raises(ssl.SSLError):
        context(certificates.Identity(ours.pem, "no certificate", "no key"), server=True)
    assert modes == [0o600] * 3
    assert list(tmp_path.iterdir()) == []


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
    Authority("another", 3600)
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
    assert Authority(name, 3600).issue("node-0").cert.startswith("-----BEGIN CERTIFICATE")

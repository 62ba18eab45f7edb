"""What ssh prints becomes an error that says what happened, why, and what to do next."""

from __future__ import annotations

import copy
import pickle

import pytest

from skyward.api.shell import SshTarget
from skyward.errors import AuthenticationFailed, BootstrapError, HostKeyMismatch, HostUnreachable
from skyward.setup.ssh.shell import by_hand, cause_of, explain

CHANGED = """\
@\r
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r
@\r
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\r
Someone could be eavesdropping on you right now (man-in-the-middle attack)!\r
It is also possible that a host key has just been changed.\r
The fingerprint for the ED25519 key sent by the remote host is
SHA256:rsmzt61oWjfN7l2hKtufsTvFvuL3SOFT5Hiao6ki0yA.\r
Please contact your system administrator.\r
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.\r
Offending ED25519 key in /home/me/.ssh/known_hosts:1\r
Host key for [gpu1]:2222 has changed and you have requested strict checking.\r
Host key verification failed.\r
"""
OPEN_KEY = """\
@
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
@
Permissions 0644 for '/home/me/id' are too open.
It is required that your private key files are NOT accessible by others.
This private key will be ignored.
Load key "/home/me/id": bad permissions
me@gpu1: Permission denied (publickey).
"""
BROKEN_JUMP = (
    "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535\r\n"
)
TARGET = SshTarget("gpu1", user="me", port=2222, key="/home/me/id")


@pytest.mark.parametrize(
    ("said", "kind", "tries", "words"),
    [
        (CHANGED, HostKeyMismatch, 1, "ssh-keygen -R [gpu1]:2222"),
        (
            "No ED25519 host key is known for [gpu1]:2222 and you have requested strict checking.\r\n"
            "Host key verification failed.\r\n",
            HostKeyMismatch,
            1,
            'host_keys="accept-new"',
        ),
        (f"Host key verification failed.\r\n{BROKEN_JUMP}", HostKeyMismatch, 1, "not known yet"),
        (
            "banner exchange: Connection to 192.0.2.1 port 22: Connection reset by peer\r\n",
            HostUnreachable,
            None,
            "start",
        ),
        (
            "@       WARNING: REVOKED HOST KEY DETECTED!               @\r\nHost key verification failed.\r\n",
            HostKeyMismatch,
            1,
            "revoked",
        ),
        ("ssh: Could not resolve hostname gpu1: Name or service not known\r\n", HostUnreachable, 2, "'gpu1' is not"),
        (
            "ssh: Could not resolve hostname gpu1: nodename nor servname provided, or not known\r\n",
            HostUnreachable,
            2,
            "'gpu1' is not a known name",
        ),
        (
            "ssh: Could not resolve hostname gpu1: Temporary failure in name resolution\r\n",
            HostUnreachable,
            None,
            "offline",
        ),
        (
            f"ssh: Could not resolve hostname jump.example: Name or service not known\r\n{BROKEN_JUMP}",
            HostUnreachable,
            2,
            "'jump.example' is not",
        ),
        (
            "ssh: connect to host gpu1 port 2222: Connection refused\r\n",
            HostUnreachable,
            None,
            "nothing listens on port 2222 of gpu1",
        ),
        ("ssh: connect to host gpu1 port 22: Connection timed out\r\n", HostUnreachable, None, "in time"),
        ("ssh: connect to host gpu1 port 22: Operation timed out\r\n", HostUnreachable, None, "in time"),
        (
            "Connection timed out during banner exchange\r\nConnection to 10.0.0.7 port 22 timed out\r\n",
            HostUnreachable,
            None,
            "in time",
        ),
        ("ssh: connect to host gpu1 port 22: No route to host\r\n", HostUnreachable, None, "no route to gpu1"),
        ("ssh: connect to host gpu1 port 22: Network is unreachable\r\n", HostUnreachable, None, "VPN"),
        (
            "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.7 port 22\r\n",
            HostUnreachable,
            None,
            "MaxStartups",
        ),
        (
            'System is booting up. Unprivileged users are not permitted to log in yet. See "pam_nologin(8)".\r\n'
            "Connection closed by 10.0.0.7 port 22\r\n",
            HostUnreachable,
            None,
            "still be starting",
        ),
        (BROKEN_JUMP, HostUnreachable, None, "ProxyCommand"),
        ("me@gpu1: Permission denied (publickey).\r\n", AuthenticationFailed, 1, "'me' with the key /home/me/id"),
        (
            "me@gpu1: Permission denied (publickey,gssapi-with-mic,password).\r\n",
            AuthenticationFailed,
            1,
            "it takes: publickey,gssapi-with-mic,password",
        ),
        (f"root@jump: Permission denied (publickey).\r\n{BROKEN_JUMP}", AuthenticationFailed, 1, "user 'root'"),
        (
            "Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures\r\n"
            "Disconnected from 10.0.0.7 port 22\r\n",
            AuthenticationFailed,
            1,
            "name one with key=",
        ),
        (OPEN_KEY, AuthenticationFailed, 1, "chmod 600 /home/me/id"),
        (
            'Load key "/home/me/id": invalid format\r\nme@gpu1: Permission denied (publickey).\r\n',
            AuthenticationFailed,
            1,
            "not a private key that ssh can read",
        ),
        (
            "/home/me/.ssh/config: line 2: Bad configuration option: bogus\r\n"
            "/home/me/.ssh/config: terminating, 1 bad configuration options\r\n",
            BootstrapError,
            1,
            "does not understand its settings",
        ),
        ("Bad owner or permissions on /home/me/.ssh/config\r\n", BootstrapError, 1, "chmod 600 /home/me/.ssh/config"),
        (
            "Unable to negotiate with 10.0.0.7 port 22: no matching cipher found. Their offer: aes256-cbc\r\n",
            BootstrapError,
            1,
            "no matching cipher found",
        ),
        (
            "skyward: no answer after the login\nThis account is currently not available.\n",
            BootstrapError,
            1,
            "no program can be run there",
        ),
        ("something new\r\n", BootstrapError, 1, "something new"),
        ("", BootstrapError, 1, "ssh said: nothing"),
    ],
)
def test_each_message_of_ssh_becomes_an_error_with_a_next_step(
    said: str, kind: type[BootstrapError], tries: int | None, words: str
) -> None:
    """Row 48: what is worth waiting for is told from what never mends."""
    error = explain(said, TARGET)
    assert type(error) is kind
    assert words in str(error)
    assert "ssh me@gpu1" in str(error)
    assert "ssh -i /home/me/id -o IdentitiesOnly=yes -p 2222 me@gpu1 true" in str(error)
    assert cause_of(said).tries == tries


def test_a_banner_is_not_taken_for_the_reason() -> None:
    banner = "Bad things happen. Permission denied (to all others). Connection refused, Invalid users go home.\r\n"
    error = explain(f"{banner}ssh: connect to host gpu1 port 22: Connection timed out\r\n", TARGET)
    assert type(error) is HostUnreachable
    assert "in time" in str(error)


def test_what_a_host_says_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in str(explain("\x1b[31mred\x1b]0;title\x07", TARGET))


def test_braces_in_what_ssh_says_are_only_braces() -> None:
    error = explain("{0.__class__}@gpu1: Permission denied ({key}).\r\n", TARGET)
    assert "{0.__class__}" in str(error)
    assert "{key}" in str(error)


def test_the_line_to_try_by_hand_is_what_we_do() -> None:
    assert by_hand(SshTarget("gpu1")) == "ssh gpu1 true"
    assert by_hand(SshTarget("gpu1", known_hosts="/a b", config=False)) == (
        "ssh -F none -o 'UserKnownHostsFile=/a b' gpu1 true"
    )


@pytest.mark.parametrize("kind", [AuthenticationFailed, HostKeyMismatch, HostUnreachable])
def test_the_errors_survive_pickling(kind: type[BootstrapError]) -> None:
    error = kind("ssh gpu1", "no answer", 2)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)

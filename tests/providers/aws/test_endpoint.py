"""Where signed requests may go: not where only a ledger says so (SEC-21, SEC-32)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from skyward.errors import InvalidArgument
from skyward.machines.ledger import Ledger
from skyward.machines.reaper import down, pools, renting_providers
from skyward.providers.aws.checks import check_endpoint
from skyward.providers.aws.provider import AWS
from tests.support.cloud import Cloud


class Trap:
    """Somebody else's port: keeps what it is sent."""

    def __init__(self) -> None:
        self.got = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.got += connection.recv(65536)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


def forged(trap: Trap) -> None:
    metadata = {"provider": "AWS", "region": "us-east-1", "endpoint_url": trap.url, "owner": "x", "expires": 1.0}
    Ledger.start("forged", metadata).let_go()


def test_a_forged_ledger_gets_no_signed_request(cloud: Cloud, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-21, SEC-32: `sky ps` sent the session token to an address that only the ledger named; that attack worked."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-session-token")
    forged(trap)
    (found,) = pools([cloud.aws()])
    assert trap.url in found.trouble
    assert "--endpoint-url" in found.trouble
    (outcome,) = down([cloud.aws()], ["forged"], really=True)
    assert outcome.did == "failed"
    assert "AWS_ENDPOINT_URL" in outcome.why
    assert trap.got == b""
    resumed = Ledger.resume("forged")
    assert resumed is not None  # nobody holds it
    resumed.remove()


def test_an_endpoint_that_the_user_names_is_used(cloud: Cloud, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `sky down --endpoint-url`, by the variable of AWS's own tools, or in the program."""
    forged(trap)
    assert [p.endpoint_url for p in renting_providers(trap.url) if isinstance(p, AWS)] == [trap.url]
    check_endpoint(trap.url, trap.url, {})
    check_endpoint(trap.url, None, {"AWS_ENDPOINT_URL": trap.url})
    check_endpoint(trap.url, None, {"AWS_ENDPOINT_URL_EC2": trap.url})
    check_endpoint("https://ec2.eu-west-1.amazonaws.com", None, {})
    check_endpoint("https://ec2.eu-west-1.api.aws", None, {})
    Ledger.resume("forged").remove()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "url",
    [
        "http://ec2.eu-west-1.amazonaws.com", "https://amazonaws.com.evil.example", "https://evil.example/.amazonaws.com",
        "https://x@evil.example", "https://evil.example#.amazonaws.com", "https://evilamazonaws.com", "", "x",
        "https://ec2.amazonaws.com:8443", "https://ec2.amazonaws.com@evil.example", "https://evil.example\\.amazonaws.com",
    ],
)  # fmt: skip
def test_what_only_looks_like_aws_is_refused(url: str) -> None:
    """SEC-21."""
    with pytest.raises(InvalidArgument, match="endpoint"):
        check_endpoint(url, None, dict(os.environ) | {"AWS_ENDPOINT_URL": "http://other"})

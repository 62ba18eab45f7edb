"""AWS: whom a pool's machines let in, also when the caller's address has changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from skyward.api.spec import Spec
from skyward.errors import PermissionDenied
from skyward.machines.ledger import read
from skyward.providers.aws import network
from tests.support.cloud import Cloud


class Echo(HTTPServer):
    """Says what the world would say of this computer's address."""

    address = "198.51.100.1"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Echo

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.server.address}\n".encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield server
        server.shutdown()


def let_in(cloud: Cloud, pool: str = "p") -> list[str]:
    """Who may log in, as the cloud has it."""
    (group,) = read(pool).left("security-group")  # type: ignore[union-attr]
    return cloud.ssh_sources("us-east-1", group)


def test_a_new_address_is_let_in_and_only_that_address(cloud: Cloud, echo: Echo) -> None:
    """SEC-1: one /32, whatever networks the computer has been in."""
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    assert let_in(cloud) == ["198.51.100.1/32"]
    assert held.readmit().changed == ""
    echo.address = "203.0.113.9"
    admission = held.readmit()
    assert "203.0.113.9/32" in admission.changed
    assert sorted(let_in(cloud)) == ["198.51.100.1/32", "203.0.113.9/32"]
    assert held.readmit().changed == ""


def test_of_the_addresses_before_only_the_last_one_is_still_let_in(cloud: Cloud, echo: Echo) -> None:
    """SEC-1: a computer between two networks comes back to either; those that it has left long ago stay outside."""
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    for last in range(2, 9):
        echo.address = f"198.51.100.{last}"
        changed = held.readmit().changed
    assert sorted(let_in(cloud)) == ["198.51.100.7/32", "198.51.100.8/32"]
    assert "no longer from 198.51.100.6/32" in changed


def test_an_ipv6_address_is_let_in_as_one_address(cloud: Cloud, echo: Echo) -> None:
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    echo.address = "2001:db8::7"
    assert "2001:db8::7/128" in held.readmit().changed
    assert sorted(let_in(cloud)) == ["198.51.100.1/32", "2001:db8::7/128"]


def test_whoever_is_let_in_is_named_with_the_group_and_the_setting(cloud: Cloud, echo: Echo) -> None:
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    (group,) = read("p").left("security-group")  # type: ignore[union-attr]
    allowed = held.readmit().allowed
    assert group in allowed
    assert "198.51.100.1/32" in allowed
    assert "VPN" in allowed
    assert "sky.AWS(ssh_from=" in allowed


def test_addresses_that_the_user_has_named_are_not_added_to(cloud: Cloud, echo: Echo) -> None:
    """SEC-1."""
    aws = cloud.aws(ssh_from="192.0.2.0/24", address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    echo.address = "203.0.113.9"
    admission = held.readmit()
    assert admission.changed == ""
    assert "203.0.113.9" in admission.allowed
    assert "is not among them" in admission.allowed
    assert let_in(cloud) == ["192.0.2.0/24"]
    echo.address = "192.0.2.77"
    assert "is not among them" not in held.readmit().allowed


def test_a_group_of_the_users_own_is_never_changed(cloud: Cloud, echo: Echo) -> None:
    import boto3

    ec2 = boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])["SecurityGroups"]
    aws = cloud.aws(ssh_from=None, security_group_id=group["GroupId"], address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    admission = held.readmit()
    assert admission.changed == ""
    assert group["GroupId"] in admission.allowed
    assert not [call for call in cloud.calls if call.action == "AuthorizeSecurityGroupIngress"]


def test_rules_that_somebody_else_has_added_stay(cloud: Cloud, echo: Echo) -> None:
    import boto3

    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    (group,) = read("p").left("security-group")  # type: ignore[union-attr]
    ec2 = boto3.Session().client("ec2", region_name="us-east-1", endpoint_url=cloud.endpoint)
    ec2.authorize_security_group_ingress(
        GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="192.0.2.200/32"
    )
    for last in (2, 3, 4):
        echo.address = f"198.51.100.{last}"
        held.readmit()
    assert sorted(let_in(cloud)) == ["192.0.2.200/32", "198.51.100.3/32", "198.51.100.4/32"]


def test_a_policy_without_the_right_to_remove_rules_lets_the_new_address_in_all_the_same(
    cloud: Cloud, echo: Echo
) -> None:
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    cloud.fail("RevokeSecurityGroupIngress", "UnauthorizedOperation", times=-1)
    for last in (2, 3):
        echo.address = f"198.51.100.{last}"
        changed = held.readmit().changed
    assert "198.51.100.3/32" in changed
    assert "ec2:RevokeSecurityGroupIngress" in changed
    assert "198.51.100.3/32" in let_in(cloud)


def test_a_policy_without_the_right_to_add_rules_says_so(cloud: Cloud, echo: Echo) -> None:
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    cloud.fail("AuthorizeSecurityGroupIngress", "UnauthorizedOperation", times=-1)
    echo.address = "203.0.113.9"
    with pytest.raises(PermissionDenied, match="ec2:AuthorizeSecurityGroupIngress"):
        held.readmit()


def test_an_address_that_cannot_be_found_changes_nothing(cloud: Cloud, echo: Echo) -> None:
    aws = cloud.aws(ssh_from=None, address_service=echo.url)
    held = aws.acquire(Spec(), "p")
    echo.address = "not an address"
    admission = held.readmit()
    assert admission.changed == ""
    assert "lets in ssh from 198.51.100.1/32" in admission.allowed
    assert "sky.AWS(ssh_from=" in admission.allowed
    assert let_in(cloud) == ["198.51.100.1/32"]


def test_the_address_is_asked_for_without_the_proxy_that_ssh_does_not_use(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert network.own_address(service=echo.url) == "198.51.100.1/32"


def test_where_only_a_proxy_leads_out_its_address_is_taken(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", echo.url)
    assert network.own_address(service="http://127.0.0.1:9") == "198.51.100.1/32"

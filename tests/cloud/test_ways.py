"""A pool whose machines have no open address: a stand-in of the program `aws` carries what ssh sends."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward import errors
from skyward.providers.aws.provider import AWS
from skyward.testing import Call
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud
from tests.support.hosts.place import SCRIPT

# Finds the machine among its arguments, and is then whatever carries bytes to that machine.
_AWS = """#!/bin/sh
[ "$1" != --version ] || { echo aws-cli/2.17.0; exit; }
[ -n "$AWS_SECRET_ACCESS_KEY" ] || { echo "no credentials" >&2; exit 9; }
for word; do
  case $word in i-*) exec sh "%s/$word" "$1" ;; esac
done
"""


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def program(cloud: Cloud, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `aws` on the path, and closes port 22 of machines to everybody but the endpoint, which is `outside`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("aws", "session-manager-plugin"):
        (directory / name).write_text(_AWS % tmp_path)
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    relay, outside = str(Path(__file__).with_name("relay.py")), hosts.network.outside

    def follow(call: Call) -> None:
        if call.action == "RunInstances":
            for one in cloud.running():
                host = hosts.of[one.id]
                host.admit([hosts.network.ports[2].address])
                agent = shlex.join(host.place.entered([*SCRIPT, relay, "127.0.0.1"], kinds=["net"]))
                endpoint = shlex.join(outside.entered([*SCRIPT, relay, host.address]))
                (tmp_path / one.id).write_text(f'[ "$1" = ssm ] && exec {agent}\nexec {endpoint}\n')

    cloud.on_done = follow


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("via", ["ssm", "eice"])
def test_calls_go_to_machines_that_let_in_nobody_from_outside(cloud: Cloud, aws: Callable[..., AWS], via: str) -> None:
    """SEC-1, SEC-6: the pool's own keys count on this way as on any other."""
    if via == "eice":
        from moto.ec2.models import ec2_backends

        backend = ec2_backends["123456789012"]["us-east-1"]
        vpc = backend.get_default_vpc()
        cloud.connect_endpoint(vpc.id, backend.get_security_group_from_name("default", vpc.id).id)
    with sky.ComputePool(provider=aws(via=via, ssh_from=None, ssh_timeout=60), nodes=2, console=False) as pool:
        assert add(1, 2) @ pool == [3, 3]


@pytest.mark.usefixtures("program")
def test_a_way_that_leads_nowhere_is_told_with_what_it_needs(
    cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS], tmp_path: Path
) -> None:
    """As without a role for SSM's agent: what the program said is shown."""
    for name in ("aws", "session-manager-plugin"):
        (tmp_path / "bin" / name).write_text(
            "#!/bin/sh\necho 'TargetNotConnected: i-1 is not connected.' >&2; exit 254\n"
        )
    with pytest.raises(errors.HostUnreachable) as caught:
        with sky.ComputePool(provider=aws(via="ssm", ssh_from=None, ssh_timeout=3), console=False):
            pass
    assert "TargetNotConnected" in str(caught.value)
    assert "AmazonSSMManagedInstanceCore" in str(caught.value)

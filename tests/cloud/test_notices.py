"""A machine of the test cloud learns from its own metadata service that it is to be taken away, and then it is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from skyward.api.spec import Spec
from skyward.providers.aws import notices
from skyward.providers.aws.provider import AWS
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud
from tests.support.hosts import Host
from tests.support.leases import returned
from tests.support.waiting import until

FACTS = """
import json, sys, urllib.request
def ask(method, path, headers):
    request = urllib.request.Request("http://169.254.169.254/latest/" + path, method=method, headers=headers)
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).read().decode()
token = ask("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
print(json.dumps([ask("GET", "meta-data/" + path, {"X-aws-ec2-metadata-token": token}) for path in sys.argv[1:]]))
"""


def waiting(host: Host) -> subprocess.Popen[str]:
    """`wait` on a host, with the host's own Python, behind the proxy that every login there is told of."""
    host.put("/tmp/notices.py", Path(notices.__file__).read_bytes())
    program = "import notices; print('waiting', flush=True); print(notices.wait(poll=0.1))"
    argv = ["env", "-C", "/tmp", "python3", "-c", program]
    return host.start(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_machine_is_told_by_its_own_metadata_service_and_taken_away(
    cloud: Cloud, hosts: Hosts, aws: Callable[..., AWS]
) -> None:
    """Row 21: the notice reaches one machine alone, whose host is gone after the deadline."""
    provider = aws()
    held = provider.acquire(Spec(nodes=2, allocation="spot"), "notices")
    first, second = (machine.id for machine in held.machines)
    named = hosts.of[second].run(["python3", "-c", FACTS, "instance-id", "placement/availability-zone", "local-ipv4"])
    assert json.loads(named.stdout) == [second, cloud.machines.all[second].zone, hosts.of[second].address]
    listening = {(row.address, row.port) for row in hosts.of[second].listeners()}
    assert ("169.254.169.254", 80) in listening
    assert "169.254" not in hosts.of[second].run(["ip", "address"]).stdout, "it is not an address of the machine"

    with waiting(hosts.of[first]) as told, waiting(hosts.of[second]) as untold:
        assert told.stdout is not None
        assert untold.stdout is not None
        assert [told.stdout.readline(), untold.stdout.readline()] == ["waiting\n"] * 2
        cloud.notice(first, seconds=600)
        assert 0 < float(told.stdout.readline()) <= 600
        assert hosts.of[first].alive
        cloud.notice(first, seconds=0.1)  # nobody has the time to wait for the other
        until(lambda: not hosts.of[first].alive)
        assert hosts.of[second].alive
        assert untold.poll() is None
        cloud.end(second)
        assert untold.stdout.read() == ""
    assert {instance.reason for instance in cloud.machines.all.values()} == {"Server.SpotInstanceTermination"}
    returned(held, provider)

"""What tests of machines that are taken away share."""

from __future__ import annotations

import socket
from typing import Any

import skyward as sky
from skyward import events
from tests.cloud.machines import Hosts
from tests.support.cloud import Cloud

__all__ = ["Seen", "instance", "who"]


@sky.compute
def who() -> tuple[int, str]:
    info: Any = sky.instance_info()
    return info.node, socket.gethostname()


class Seen(list[events.Event]):
    """What a pool has told."""

    def texts(self) -> str:
        return "\n".join(event.text for event in self if isinstance(event, events.Notice))

    def working(self) -> int:
        return sum(isinstance(event, events.Output) and event.text == "working" for event in self)


def instance(cloud: Cloud, hosts: Hosts, host: str) -> str:
    """The machine that runs under a host's name now."""
    return next(one.id for one in cloud.running() if hosts.of[one.id].name == host)

"""Step 10: the same on other machines: `python 10_other_machines.py gpu1 user@10.0.0.7`."""

import os
import sys

import skyward as sky


@sky.compute
def who() -> str:
    return f"node {sky.instance_info().node} is {os.uname().nodename}"


if __name__ == "__main__":
    hosts = sys.argv[1:]
    where = sky.SSH(hosts=hosts) if hosts else sky.Local()
    with sky.ComputePool(provider=where, nodes=len(hosts) or 2) as pool:
        print("\n".join(who() @ pool))

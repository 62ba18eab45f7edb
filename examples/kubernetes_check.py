"""The first thing to run with a Kubernetes cluster: what works there, what is missing, and why.

    python kubernetes_check.py                      looks, opens a pool of two pods, uses it, deletes it, reports
    python kubernetes_check.py --nodes 1 --gpu A100
    python kubernetes_check.py --namespace research --image registry.example.org/python:3.11

What it makes is one Job and one Secret, and both are gone at the end. The report names no people and no addresses:
send it to us.
"""

import argparse
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

import skyward as sky


@sky.compute
def describe() -> dict[str, str]:
    """What a pod is."""
    import os

    found = {"python": platform.python_version(), "system": platform.platform(), "cpus": str(os.cpu_count())}
    return {**found, "user": str(os.getuid()), "gpus": ", ".join(sky.instance_info().node_gpus) or "none"}


@sky.compute
def echo(data: bytes) -> bytes:
    return data


def timed(what: str, act: Callable[[], object]) -> None:
    began = time.monotonic()
    found = act()
    print(f"ok       {what}: {time.monotonic() - began:.2f} s{'' if found is None else f', {found}'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context")
    parser.add_argument("--namespace")
    parser.add_argument("--image")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpu", help="such as A100, or A100:8")
    parser.add_argument("--template", help="a YAML file with what the cluster needs")
    words = parser.parse_args()
    print(f"skyward {version('skyward')}, Python {platform.python_version()}, {platform.system()}")
    provider = sky.Kubernetes(
        context=words.context, namespace=words.namespace, image=words.image, template=words.template
    )
    began = time.monotonic()
    try:
        pool = sky.ComputePool(
            provider=provider, nodes=words.nodes, accelerator=words.gpu, ttl=1800, provision_timeout=900
        )
        with pool:
            print(f"ok       opened {words.nodes} pods in {time.monotonic() - began:.1f} s")
            for number, found in enumerate(describe() @ pool):
                print(f"ok       pod {number}: {', '.join(f'{name} {value}' for name, value in found.items())}")
            timed("100 calls, one after the other", lambda: [echo(b"") >> pool for _ in range(100)] and None)
            data = bytes(20 << 20)
            timed("20 MB there and back", lambda: f"{len(echo(data) >> pool) >> 20} MB")
        print(f"ok       {pool.receipt}")
    except sky.SkywardError as exc:
        print(f"problem  {type(exc).__name__}: {exc}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

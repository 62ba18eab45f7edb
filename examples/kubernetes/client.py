"""The client of a pool whose nodes are the pods of job.yaml; docs/guides/kubernetes.md says where it runs."""

import argparse
import socket

import skyward as sky


@sky.compute
def where() -> str:
    return socket.gethostname()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="as many as job.yaml has completions")
    parser.add_argument("--file", default="join.py", help="where the program for the pods is written")
    args = parser.parse_args()
    pods = sky.Join(nodes=args.nodes, file=args.file)
    with sky.ComputePool(provider=pods, provision_timeout=1800) as pool:
        print("the nodes are", ", ".join(where() @ pool), flush=True)


if __name__ == "__main__":
    main()

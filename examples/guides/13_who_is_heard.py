"""What a body knows of its place in the pool, and which nodes are heard: the head, some, or none."""

import argparse
import sys

import skyward as sky


@sky.compute
@sky.stdout(only="head")
def steps(count: int) -> str:
    """Print progress on the head alone; return where this ran."""
    info = sky.instance_info()
    for step in range(count):
        print(f"step {step + 1} of {count}, told by node {info.node}")
    if info.is_head:
        print(f"node {info.node} would save a checkpoint now; the others would not")
    return f"node {info.node} of {info.total_nodes}, with {info.accelerators} GPUs; the head is at {info.head_addr}"


@sky.compute
@sky.stdout(only=lambda info: info.node < 2)
@sky.stderr(only="head")
def talk() -> None:
    """Two nodes are heard on stdout, one on stderr."""
    node = sky.instance_info().node
    print(f"node {node} to stdout")
    print(f"node {node} to stderr", file=sys.stderr)


@sky.compute
@sky.silent
def whisper() -> int:
    """Nobody is heard; the result comes all the same."""
    print("this is shown nowhere")
    return sky.instance_info().node


def main() -> None:
    """Send each of them to every node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=3)
    args = parser.parse_args()

    provider = {"local": sky.Local}[args.provider]()
    heard: list[str] = []
    with sky.ComputePool(provider=provider, nodes=args.nodes) as pool:
        pool.on_event(lambda event: heard.append(event.text) if isinstance(event, sky.events.Output) else None)
        for place in steps(2) @ pool:
            print(place)
        talk() @ pool
        nodes = whisper() @ pool
    print(f"{len(heard)} lines were heard from {len(nodes)} nodes")
    if nodes != list(range(args.nodes)) or any("nowhere" in line for line in heard):
        raise SystemExit("something is wrong: a node is missing, or was heard")


if __name__ == "__main__":
    main()

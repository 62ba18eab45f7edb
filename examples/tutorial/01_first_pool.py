"""Step 1: a function on four nodes."""

import skyward as sky


@sky.compute
def greet(name: str) -> str:
    where = sky.instance_info()
    return f"hello {name}, from node {where.node} of {where.total_nodes}"


if __name__ == "__main__":
    with sky.ComputePool(nodes=4) as pool:
        for line in greet("you") @ pool:
            print(line)

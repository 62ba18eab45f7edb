"""Runs a call that failed on a node again, on this computer."""

import skyward as sky

LINES = ["3 pears", "12 apples", "plums"]


@sky.compute
def count(line: str) -> int:
    number, _, _ = line.partition(" ")
    return int(number)


def main() -> None:
    failure: Exception | None = None
    with sky.ComputePool(nodes=2, console=False) as pool:
        try:
            pool.map(count, LINES)
        except ValueError as error:
            failure = error
    assert failure is not None
    try:
        sky.replay(failure)
    except ValueError as again:
        print("it fails here, too:", again)


if __name__ == "__main__":
    main()

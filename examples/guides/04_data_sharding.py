"""Give every node its own part of the data: statistics of a year of weather, computed in pieces and put together."""

import argparse
import random

import skyward as sky

DAYS = 366


def weather(day: int) -> tuple[float, bool]:
    """Temperature and whether it rained; each day is always the same, here and on every node."""
    chance = random.Random(day)
    temperature = 10 - 12 * abs(day - 183) / 183 + chance.gauss(6, 3)
    return temperature, chance.random() < 0.3


@sky.compute
def summary(days: range) -> dict:
    """How many of this node's days there are, their temperatures added up, and how many were wet."""
    mine = sky.shard(days)  # every N-th day, beginning with this node's number
    seen = [weather(day) for day in mine]
    return {"days": list(mine), "warmth": sum(t for t, _ in seen), "wet": sum(rain for _, rain in seen)}


@sky.compute
def hottest(days: list[int], temperatures: tuple[float, ...]) -> tuple[int, float]:
    """The hottest of this node's days: two things that belong together are cut in the same places."""
    days, temperatures = sky.shard(days, temperatures, shuffle=True, seed=42)
    assert isinstance(days, list)
    assert isinstance(temperatures, tuple)
    return max(zip(days, temperatures, strict=True), key=lambda pair: pair[1])


@sky.compute
def sizes(days: range) -> tuple[int, int]:
    """How many days a node has, with what is left over and without it."""
    return len(sky.shard(days)), len(sky.shard(days, drop_last=True))


def main() -> None:
    """Cut a year in parts, look at each on its own node, and compare with the whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=4)
    args = parser.parse_args()

    year = range(1, DAYS + 1)
    whole = [weather(day) for day in year]
    temperatures = tuple(temperature for temperature, _ in whole)

    provider = {"local": sky.Local}[args.provider]()
    with sky.ComputePool(provider=provider, nodes=args.nodes) as pool:
        parts = summary(year) @ pool
        peaks = hottest(list(year), temperatures) @ pool
        counts = sizes(year) @ pool

    covered = sorted(day for part in parts for day in part["days"])
    mean = sum(part["warmth"] for part in parts) / DAYS
    print(f"{len(parts)} nodes looked at {', '.join(str(len(part['days'])) for part in parts)} days")
    print(f"mean temperature {mean:.2f}, {sum(part['wet'] for part in parts)} wet days")
    print(f"hottest day: number {max(peaks, key=lambda peak: peak[1])[0]}")
    print(f"days a node, all and with drop_last: {counts}")

    assert covered == list(year), "every day is seen once"
    assert abs(mean - sum(temperatures) / DAYS) < 1e-9
    assert max(peaks, key=lambda peak: peak[1])[1] == max(temperatures)
    assert len({equal for _, equal in counts}) == 1


if __name__ == "__main__":
    main()

"""Step 5: one data set, each node with its part of it."""

import skyward as sky


@sky.compute
def count_words(lines: list[str]) -> int:
    return sum(len(line.split()) for line in sky.shard(lines))


if __name__ == "__main__":
    text = ["the quick brown fox", "jumps over", "the lazy dog"] * 1000
    with sky.ComputePool(nodes=3) as pool:
        parts = count_words(text) @ pool
    print(f"{sum(parts)} words; the nodes counted {parts}")

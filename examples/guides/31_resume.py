"""A sweep whose results are kept: start it twice, or with more rates, and only what is missing is computed."""

import argparse

import skyward as sky

RATES = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]


@sky.compute
def train(rate: float) -> float:
    """Stands for a training run."""
    print(f"training with rate={rate}")
    return 1 / rate


def main(rates: list[float]) -> None:
    with sky.ComputePool(nodes=2) as pool:
        losses = pool.map(train, rates, resume="grid-1")
    print(f"{len(losses)} losses: {losses}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=int, default=len(RATES), help="how many of the rates")
    main(RATES[: parser.parse_args().rates])

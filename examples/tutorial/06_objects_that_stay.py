"""Step 6: data that is sent once, and a model that is loaded once."""

import skyward as sky


@sky.once
def model() -> dict[str, float]:
    print("loading")
    return {"weight": 2.0, "bias": 0.5}


@sky.compute
def predict(table: dict[str, float], key: str) -> float:
    return model()["weight"] * table[key] + model()["bias"]


if __name__ == "__main__":
    with sky.ComputePool(nodes=2) as pool:
        table = pool.put({"a": 1.0, "b": 2.0, "c": 3.0})
        print(sky.gather(*(predict(table, key) for key in "abc")) >> pool)

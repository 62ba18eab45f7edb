"""One JAX computation over several nodes: a curve is fitted to points of which every node holds a part."""

import argparse

import numpy as np

import skyward as sky


def points(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy points of a cubic curve."""
    chance = np.random.default_rng(0)
    x = chance.uniform(-1, 1, count).astype("float32")
    y = 2 * x**3 - x + 0.5 + chance.normal(0, 0.1, count)
    return x, y.astype("float32")


@sky.compute
@sky.integrations.jax()
def fit(x: np.ndarray, y: np.ndarray, steps: int) -> dict:
    """Gradient descent over the points of all nodes; the coefficients, and what this node has seen."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("points",))
    spread = NamedSharding(mesh, PartitionSpec("points"))
    mine = sky.shard(x, y, drop_last=True)
    everyone = [jax.make_array_from_process_local_data(spread, part) for part in mine]

    def loss(coefficients: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.polyval(coefficients, x) - y) ** 2)

    @jax.jit
    def step(coefficients: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, slope = jax.value_and_grad(loss)(coefficients, x, y)
        return coefficients - 0.5 * slope, value

    coefficients, value = jnp.zeros(4), jnp.inf
    for _ in range(steps):
        coefficients, value = step(coefficients, *everyone)
    return {
        "coefficients": np.asarray(coefficients).tolist(),
        "loss": float(value),
        "devices": (jax.local_device_count(), jax.device_count()),
        "points": (len(mine[0]), everyone[0].size),
    }


def main() -> None:
    """Open the nodes, fit, and compare with what numpy finds alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()

    x, y = points(20_000)
    provider = {"local": sky.Local}[args.provider]()
    with sky.ComputePool(provider=provider, nodes=args.nodes, plugins=[sky.plugins.jax()]) as pool:
        results = fit(x, y, args.steps) @ pool

    for node, result in enumerate(results):
        print(f"node {node}: {result['points'][0]} of {result['points'][1]} points, {result['devices'][1]} devices")
    found, wanted = results[0]["coefficients"], np.polyfit(x, y, 3)
    print(f"found {np.round(found, 2)}, numpy alone {np.round(wanted, 2)}, loss {results[0]['loss']:.4f}")
    if any(result != {**results[0], "devices": result["devices"]} for result in results):
        raise SystemExit("something is wrong: the nodes disagree")
    if not np.allclose(found, wanted, atol=0.05):
        raise SystemExit("something is wrong: the curve was not found")


if __name__ == "__main__":
    main()

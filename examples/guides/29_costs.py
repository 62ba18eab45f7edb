"""What a pool costs: looked at before it is opened, limited while it is open, and on a receipt afterwards."""

import argparse

import skyward as sky


@sky.compute
def work(seconds: float) -> str:
    import time

    time.sleep(seconds)
    return f"node {sky.instance_info().node} is done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--yes", action="store_true", help="rent machines; without it the plan is printed")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=2.0, help="dollars that may be spent at the most")
    parser.add_argument("--max-hourly-cost", type=float, default=1.0, help="dollars an hour for all of them")
    args = parser.parse_args()

    pool = sky.ComputePool(
        provider=sky.AWS(),
        nodes=args.nodes,
        accelerator="T4",
        allocation="spot-if-available",
        max_hourly_cost=args.max_hourly_cost,
        ttl=3600 * args.budget / args.max_hourly_cost,
    )
    if not args.yes:
        plan = pool.plan()
        print(plan)
        hours = args.budget / plan.hourly_cost
        print(f"${args.budget:g} are {hours:.1f} hours. Nothing was launched. Say --yes to do it.")
        return

    with pool:
        print(work(60) @ pool)
    print(pool.receipt)


if __name__ == "__main__":
    main()

"""`sky offers`: available machines with location and price, and why others are not available."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skyward.cli.common import add_command, add_json

if TYPE_CHECKING:
    from skyward.api.provider import Provider
    from skyward.machines.offers import Quote, Quotes, Refusal

__all__ = ["add", "run"]

_REASONS = 12


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "offers",
        "list available machines and prices",
        "Lists machines that fit, by price: where they are, the price of an hour (all nodes, one node, one "
        "accelerator), spot or on-demand, their size, what is known of their availability, and why others do not fit. "
        "Without --provider it asks everything that this computer can use: itself, AWS if a login is found, Slurm if "
        "its programs are installed, and providers of other packages. Nothing is created.",
        [
            "sky offers --accelerator A100",
            'sky offers --accelerator "H100:8" --nodes 2 --region us-east-1 --region eu-west-1 --spot',
            "sky offers --cpus 16 --memory 64 --max-price 2",
            "sky offers --provider slurm --accelerator A100",
            "sky offers --host gpu1 --host gpu2",
        ],
        "exit status: 0 if something is available, 1 if nothing is, 2 for a wrong command line, 130 after Ctrl-C.",
        "one object per line: those with `name` are offers, those with `why` say what is not available; a price of "
        "null is not known.",
    )
    parser.add_argument("--accelerator", metavar="NAME", help='what each node has, such as A100 or "H100:8" (none)')
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="how many nodes (1)")
    parser.add_argument("--provider", metavar="KIND", help="ask only this one: aws, slurm, ssh, local, ray, dask, ...")
    parser.add_argument("--region", action="append", default=[], metavar="R", help="a region of AWS (repeat)")
    parser.add_argument("--profile", help="the profile of your AWS settings")
    parser.add_argument("--host", action="append", default=[], metavar="HOST", help="a host with ssh (repeat)")
    parser.add_argument("--address", metavar="URL", help="where Ray or dask is; with --provider")
    market = parser.add_mutually_exclusive_group()
    market.add_argument("--spot", action="store_true", help="spot machines only")
    market.add_argument("--on-demand", action="store_true", help="no spot machines")
    parser.add_argument("--max-price", type=float, metavar="DOLLARS", help="per hour, for all nodes together")
    parser.add_argument("--cpus", type=float, metavar="N", help="vCPUs per node, at least")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory per node, at least")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from skyward.api.spec import Spec
    from skyward.cli.common import print_json
    from skyward.machines.offers import Quotes, Refusal, ask, wish

    spec = Spec(
        accelerator=arguments.accelerator,
        nodes=arguments.nodes,
        vcpus=arguments.cpus,
        memory_gb=arguments.memory,
        max_hourly_cost=arguments.max_price,
        allocation="spot" if arguments.spot else "on-demand" if arguments.on_demand else "cheapest",
    )
    found, unasked = Quotes(), list[Refusal]()
    for name, provider in _asked(arguments, unasked):
        found += ask(provider, spec, arguments.nodes, name)
    found += Quotes(refusals=tuple(unasked))
    if arguments.json:
        for quote in found.quotes:
            print_json(quote.record())
        for refusal in found.refusals:
            print_json(refusal)
    else:
        print("\n".join(_text(found, wish(spec), short=not arguments.provider and not arguments.region)))
    return 0 if any(quote.availability.possible is not False for quote in found.quotes) else 1


def _asked(arguments: argparse.Namespace, refusals: list[Refusal]) -> list[tuple[str, Provider]]:
    from skyward import extensions
    from skyward.errors import InvalidArgument, SkywardError
    from skyward.machines.offers import Refusal

    kinds = {name.lower(): point for name, point in extensions.found("providers").items()}
    kind = arguments.provider.lower() if arguments.provider else "ssh" if arguments.host else None
    if kind is not None and kind not in kinds:
        raise InvalidArgument(f"--provider {arguments.provider}: there are {', '.join(sorted(kinds))}.")
    if arguments.address and kind not in ("ray", "dask"):
        raise InvalidArgument("--address says where Ray or dask is: give --provider ray or --provider dask with it.")
    if kind == "ssh" and not arguments.host:
        raise InvalidArgument("--provider ssh: name the hosts, --host gpu1 --host gpu2.")
    if kind in ("ray", "dask") and not arguments.address:
        raise InvalidArgument(f"--provider {kind}: say where it is, --address URL.")
    if (arguments.region or arguments.profile) and kind not in (None, "aws"):
        raise InvalidArgument(f"--region and --profile are for AWS, not for --provider {kind}.")
    if kind is not None:
        chosen = [kind]
    elif arguments.region or arguments.profile:
        chosen = ["aws"]
    else:
        chosen = [name for name in kinds if name not in ("ssh", "ray", "dask", "join", "slurm")]
        chosen += ["slurm"] if shutil.which("sbatch") else []
    made: list[tuple[str, Provider]] = []
    for name in chosen:
        try:
            made += _made(name, kinds[name].load(), arguments)
        except (SkywardError, ImportError, TypeError) as exc:  # a provider of somebody else's may need arguments
            if kind is not None and isinstance(exc, SkywardError):
                raise
            refusals.append(Refusal(name, "", f"it was not asked: {exc}"))
    return made


def _made(kind: str, provider: Any, arguments: argparse.Namespace) -> list[tuple[str, Provider]]:
    if kind == "ssh":
        return [("SSH", provider(hosts=arguments.host))]
    if kind in ("ray", "dask"):
        return [(provider.__name__, provider(arguments.address))]
    if kind != "aws":
        return [(provider.__name__, provider())]
    regions = list(dict.fromkeys(arguments.region)) or [""]
    made = [provider(region=region, profile=arguments.profile) for region in regions]
    return [(f"AWS {each.region}", each) for each in made]


def _text(found: Quotes, wished: str, short: bool) -> list[str]:
    lines = [f"{wished.removesuffix(', cheapest')}; prices are dollars an hour"]
    rows, zones = _rows(found.quotes)
    if rows:
        lines += ["", *_table(rows)]
    else:
        lines.append("nothing is available")
    if found.refusals:
        reasons = list(_reasons(found.refusals, short))
        lines += ["", "not available:", *(f"  {reason}" for reason in reasons[:_REASONS])]
        if len(reasons) > _REASONS:
            lines.append(f"  ... and {len(reasons) - _REASONS} more: --json lists them all")
    if zones:
        lines += ["", f"each type in its cheapest zone; --json has the other {zones}"]
    return [*lines, *([""] if found.notes and not zones else []), *found.notes]


def _reasons(refusals: Sequence[Refusal], short: bool) -> Iterator[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        why = refusal.why.partition(". ")[0] if short and not refusal.what else refusal.why
        grouped.setdefault((refusal.provider, why), []).append(refusal.what)
    for (provider, why), names in grouped.items():
        named = ", ".join(filter(None, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"{provider}: {f'{named}: ' if named else ''}{why}"


def _rows(quotes: Sequence[Quote]) -> tuple[list[Sequence[str]], int]:
    from skyward.machines.offers import CloudOffer

    rows: list[Sequence[str]] = []
    seen: set[tuple[str, ...]] = set()
    for quote in quotes:
        offer = quote.offer
        cloud = offer if isinstance(offer, CloudOffer) else None
        if cloud is not None:
            key = (quote.provider, cloud.kind, cloud.market)
            if key in seen:
                continue
            seen.add(key)
        memory = f" {cloud.accelerator_gb}GB" if cloud and cloud.accelerator_gb else ""
        rows.append(
            (
                _dollars(quote.hourly_cost, quote),
                _dollars(offer.hourly_cost, quote),
                "" if quote.per_accelerator is None else _dollars(quote.per_accelerator, quote),
                cloud.kind if cloud else offer.name,
                cloud.market if cloud else "",
                f"{cloud.accelerators} x {cloud.accelerator}{memory}" if cloud and cloud.accelerators else "",
                "" if offer.vcpus is None else f"{offer.vcpus:g}",
                "" if offer.memory_gb is None else f"{offer.memory_gb:.0f} GB",
                (cloud.zone or cloud.region) if cloud else quote.provider,
                ("no: " if quote.availability.possible is False else "") + quote.availability.text,
            )
        )
    nodes = quotes[0].nodes if quotes else 1
    head = (
        "1 node" if nodes == 1 else f"{nodes} nodes",
        "a node",
        "accelerator",
        "machine",
        "",
        "with",
        "vCPUs",
        "memory",
    )
    return ([(*head, "where", "availability"), *rows] if rows else []), len(quotes) - len(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    drop = {1} if rows[0][0] == "1 node" else set[int]()
    used = [n for n in range(len(rows[0])) if n not in drop and any(row[n] for row in rows[1:])]
    widths = {n: max(len(row[n]) for row in rows) for n in used}
    right = {0, 1, 2, 6, 7}
    return [
        "  ".join(row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in used).rstrip()
        for row in rows
    ]


def _dollars(amount: float, quote: Quote) -> str:
    from skyward.machines.offers import CloudOffer, money

    if math.isinf(amount):
        return "unknown"
    if not amount:
        return "no price"
    most = isinstance(quote.offer, CloudOffer) and quote.offer.price == "at most"
    return f"{'<= ' if most else ''}{money(amount)}"

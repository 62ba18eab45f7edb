"""What users give to a pool, checked before anything is started."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from skyward.api.brief import brief
from skyward.api.compute import PendingComputeGroup
from skyward.api.image import check_number, check_one_of
from skyward.api.plugin import Plugin
from skyward.api.provider import Provider
from skyward.api.spec import Spec, Worker
from skyward.api.usage_errors import SPELLED
from skyward.errors import InvalidArgument
from skyward.machines.acquire import Candidate, Selection, candidate
from skyward.node.run_folder import RUN, RUN_NAME
from skyward.providers.local import Local

__all__ = [
    "check_limits",
    "check_listener",
    "checked",
    "checked_budget",
    "checked_group",
    "checked_name",
    "checked_plugins",
    "checked_replace",
    "checked_selection",
    "checked_switch",
    "chosen_specs",
    "chosen_worker",
]

T = TypeVar("T")

_count = itertools.count(1)
_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(Spec).parameters.items() if name != "provider"
}


def chosen_specs(specs: Sequence[Spec], provider: Provider | None, options: dict[str, Any]) -> tuple[Candidate, ...]:
    if options["nodes"] is None:
        options["nodes"] = provider.default_nodes if isinstance(provider, Provider) else _DEFAULTS["nodes"]
    if specs and provider is not None:
        raise InvalidArgument("give either Spec objects or provider=..., not both: a Spec names its own provider.")
    for spec in specs:
        if isinstance(spec, int):
            raise InvalidArgument(f"ComputePool({spec}): say what the number means, `sky.ComputePool(nodes={spec})`.")
        if isinstance(spec, Provider):
            raise InvalidArgument("a provider is passed by keyword: `sky.ComputePool(provider=...)`.")
        if isinstance(spec, str):
            raise InvalidArgument(
                f"ComputePool({spec!r}): expected a sky.Spec, or `sky.ComputePool(accelerator={spec!r})`."
            )
        if isinstance(spec, list | tuple):
            raise InvalidArgument("ComputePool([...]): pass Specs one by one, `sky.ComputePool(*specs)`.")
        checked("specs", spec, Spec)
    beside = [name for name, value in options.items() if specs and value != _DEFAULTS[name]]
    if beside:
        raise InvalidArgument(f"{', '.join(beside)}: set it in the Spec; beside a Spec it has no effect.")
    found = tuple(candidate(spec, Local()) for spec in specs or [Spec(provider=provider, **options)])
    if len(found) > 1:
        for one in found:
            _check_here(one)
    return found


def _check_here(one: Candidate) -> None:
    wanted = one.spec.accelerator
    if RUN in os.environ or wanted is None or not isinstance(one.provider, Local):
        return
    from skyward.api.matching import compare
    from skyward.node.gpus import look

    if refusal := compare(wanted, look()).refusal:
        raise InvalidArgument(
            f"accelerator={wanted.name} in a Spec for this computer, which {refusal}. "
            f"Say which provider has them: sky.Spec(provider=sky.AWS(), accelerator={wanted.name!r}, ...)."
        )


def chosen_worker(concurrency: int | None, worker: Any) -> Worker:
    if concurrency is not None and worker is not None:
        raise InvalidArgument("give either concurrency=n or worker=sky.Worker(...), not both.")
    if type(worker) is int:
        raise InvalidArgument(f"worker={worker}: expected a sky.Worker. A number of slots is `concurrency={worker}`.")
    if worker is not None:
        return checked("worker", worker, Worker)
    return Worker(concurrency=concurrency) if concurrency is not None else Worker()


def check_limits(
    provision_timeout: Any, grace: Any, max_result_bytes: Any, default_compute_timeout: Any, stall_timeout: Any
) -> None:
    check_number("provision_timeout", provision_timeout, whole=False)
    check_number("grace", grace, whole=False)
    check_number("max_result_bytes", max_result_bytes)
    for name, limit in (("default_compute_timeout", default_compute_timeout), ("stall_timeout", stall_timeout)):
        if limit is not None:
            check_number(name, limit, whole=False)


def checked_budget(budget: Any) -> float | None:
    if budget is not None:
        check_number("budget", budget, whole=False)
    return budget


def checked_replace(replace: Any, candidates: Sequence[Candidate]) -> bool | None:
    if replace is None:
        return None
    if checked_switch("replace", replace) and not any(one.provider.elastic for one in candidates):
        raise InvalidArgument(
            f"replace=True: {candidates[0].provider.name} has no other machines to put in the place of lost ones. "
            "Leave it out: a machine that comes back is set up again by itself."
        )
    return bool(replace)


def checked_plugins(plugins: Any) -> tuple[Plugin, ...]:
    if isinstance(plugins, Plugin):
        name = plugins.name
        raise InvalidArgument(f"plugins={name}: expected a list, even for one: plugins=[{_called(name)}].")
    if isinstance(plugins, str):
        raise InvalidArgument(
            f"plugins={plugins!r}: expected a list of plugins, as functions make them: plugins=[{_called(plugins)}]."
        )
    if not isinstance(plugins, list | tuple):
        raise InvalidArgument(f"plugins={brief(plugins)}: expected a list, even for one: plugins=[...].")
    for plugin in cast("Sequence[Any]", plugins):
        if isinstance(plugin, str):
            raise InvalidArgument(f"plugins=[{plugin!r}]: a plugin is made by a function: plugins=[{_called(plugin)}].")
        if callable(plugin) and not isinstance(plugin, Plugin):
            spelled: str = getattr(plugin, SPELLED, "") or getattr(plugin, "__name__", "")
            if not spelled or spelled.startswith("sky.integrations."):
                called = _called(spelled.rpartition(".")[2]) if spelled else "sky.plugins.torch()"
                raise InvalidArgument(
                    f"plugins=[{spelled or brief(plugin)}]: that is for functions, not for pools. A plugin is made "
                    f"by a function of sky.plugins: plugins=[{called}]."
                )
            raise InvalidArgument(f"plugins=[{spelled}]: add parentheses, plugins=[{spelled}()].")
    found = tuple(checked("plugins", plugin, Plugin) for plugin in cast("Sequence[Any]", plugins))
    names = [plugin.name for plugin in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgument(
            f"plugins=[...] has the plugin {twice!r} {names.count(twice)} times, so its hooks would run that often. "
            f"Keep the one whose arguments you want."
        )
    return found


def checked_name(name: Any) -> str:
    if name is None and RUN in os.environ:
        name = os.environ[RUN_NAME][:63]
    if name is None:
        program = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "python").stem
        safe = "".join(c if c.isalnum() and c.isascii() else "-" for c in program)[:30].strip("-")
        return f"{safe or 'pool'}-{os.getpid()}-{next(_count)}-{secrets.token_hex(2)}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise InvalidArgument(
            f"name={name!r} cannot be a pool's name, which is a letter or digit, then up to 62 of those, '.', '_' and "
            "'-'. Write it like name='train-1'."
        )
    return name


def checked_switch(name: str, value: Any, words: Sequence[str] = ()) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return value
    raise InvalidArgument(f"{name}={value!r}: expected True or False{''.join(f', {word!r}' for word in words)}.")


def checked_replay_limit(limit: Any) -> int:
    """In bytes; 0 keeps none."""
    if limit != 0 or isinstance(limit, bool):
        check_number("max_replay_bytes", limit)
    return limit


def check_listener(listener: Any) -> None:
    if not callable(listener):
        raise InvalidArgument(f"on_event({listener!r}): expected a function that takes an event, on_event(print).")


def checked_selection(selection: Any) -> Selection:
    check_one_of("selection", selection, get_args(Selection))
    return selection


def checked_group(group: Any) -> PendingComputeGroup[Any]:
    if not isinstance(group, PendingComputeGroup):
        raise TypeError(f"a pool runs groups of calls, such as `a() & b()` or sky.gather(...), not {group!r}.")
    return cast("PendingComputeGroup[Any]", group)


def checked(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        packages: Any = cast(Any, value) if isinstance(value, list | tuple) else ["numpy"]
        instead = f" Write image=sky.Image(pip={list(packages)!r})." if name == "image" else ""
        if name == "image" and isinstance(value, str):
            instead = " It names Python and packages, not a container: sky.Image(python='3.12', pip=[...])."
        if name == "image" and isinstance(value, dict):
            instead = " Write image=sky.Image(**settings)."
        raise InvalidArgument(f"{name}={value!r}: expected a sky.{kind.__name__}.{instead}")
    return value


def _called(name: str) -> str:
    from difflib import get_close_matches

    known = ("torch", "jax", "keras", "huggingface", "joblib", "sklearn")
    usual = {"pytorch": "torch", "transformers": "huggingface", "scikit-learn": "sklearn", "tensorflow": "keras"}
    near = get_close_matches(name.lower(), known, 1, 0.6)
    found = usual.get(name.lower()) or (near[0] if near else name)
    return f"sky.plugins.{found}({'token=...' if found == 'huggingface' else ''})"

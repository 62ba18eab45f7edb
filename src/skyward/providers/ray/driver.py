"""Holds the places of a pool on a Ray cluster: a placement group, and for each bundle an actor that runs the joiner.

A program of its own, for the cluster's Python: it needs Ray and the standard library only. Its order is a file, which
it removes, or a line of standard input, whose end then ends everything. Events are lines of JSON after a mark.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

__all__ = ["MARK", "main"]

MARK = "skyward: "
_INFEASIBLE = 5.0
"""Seconds until Ray's word counts that no node fits: at first it does not know all nodes."""
_PAUSES = (1.0, 2.0, 5.0, 10.0, 15.0)
_LASTING = 60.0
"""Seconds after which a joiner has not failed at the start."""
_LOOK = 2.0
_SHOWN = 8
_GRACE = 30.0


def main() -> None:
    if len(sys.argv) > 1:
        with open(sys.argv[1]) as file:
            order = json.load(file)
        os.unlink(sys.argv[1])  # it holds a secret
    else:
        order = json.loads(sys.stdin.readline())
    holder = Holder(order)
    signal.signal(signal.SIGTERM, holder.on_sigterm)
    if len(sys.argv) == 1:
        threading.Thread(target=holder.until_input_ends, daemon=True).start()
    try:
        holder.connect()
        signal.signal(signal.SIGTERM, holder.on_sigterm)  # Ray has put in its own
        holder.hold()
    except Exception as exc:  # the client tells its user
        say({"failed": f"{type(exc).__name__}: {exc}"})
        holder.finish(1)
    holder.finish(0)


def say(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def reason(text: str) -> str:
    """Skips Ray's first line, which is always the same, and ids."""
    said = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(said[1:] or said or [text.strip()])[:300]


class Joiner:
    def __init__(self) -> None:
        self._argv: list[str] = []
        self._text = b""
        self._source = -1
        self._process: Any = None
        self._errors: Any = None
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ray may ignore it, and then no exit code is ever known

    def start(self, place: int, program: str, text: str) -> dict[str, Any]:
        """The secret goes through a pipe, and the program is a file without a name."""
        ray: Any = importlib.import_module("ray")
        self._source = os.memfd_create("join.py")
        os.write(self._source, program.encode())
        self._argv = [sys.executable, "-I", f"/proc/self/fd/{self._source}", "--stdin", "--place", str(place)]
        self._text = text.encode() + b"\n"
        self._run()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "address": ray.util.get_node_ip_address(), "gpus": gpus}

    def wait(self) -> tuple[int, str]:
        """Exit code and last output. Retries while the client takes an earlier joiner for alive."""
        pause = 1.0
        while True:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace")[-2000:].strip()
            if "does not let this machine in" not in said:
                # what it runs at its end may print after it
                own = [line[len(MARK) :] for line in said.splitlines() if line.startswith(MARK)]
                return code, own[-1] if own else said.rpartition("\n")[2]
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
            self._run()

    def warn(self, seconds: float) -> None:
        try:
            self._process.stdin.write(json.dumps({"notice": seconds}).encode() + b"\n")
        except OSError:
            pass  # it has ended

    def _run(self) -> None:
        import subprocess
        import tempfile

        dropped = ("RAY_", "PYTHON", "OMP_NUM_THREADS")  # what Ray sets for this process is not for users' bodies
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the joiner has ended
        self._process = subprocess.Popen(
            self._argv,
            env={name: value for name, value in os.environ.items() if not name.startswith(dropped)},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, pass_fds=[self._source],
            start_new_session=True, cwd="/", bufsize=0,
        )  # fmt: skip
        self._process.stdin.write(self._text)


class Bundle:
    def __init__(self, index: int, place: int) -> None:
        self.index, self.place = index, place
        self.actor: Any = None
        self.node = ""
        self.began = 0.0
        self.failures = 0
        self.due: float | None = 0.0
        self.leaving = False


class Holder:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._group: Any = None
        self._waits: dict[Any, tuple[Bundle, str]] = {}
        self._draining: list[str] = []
        self._finishing = threading.Lock()

    def connect(self) -> None:
        """As a job of its own, whose actors get none of our files."""
        import logging

        config = json.loads(os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        config.pop("runtime_env", None)
        config.setdefault("metadata", {})["skyward"] = self._order["pool"]
        os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(config)
        address = self._order.get("address")
        _module("ray").init(address=address, namespace="skyward", log_to_driver=False, logging_level=logging.ERROR)

    def hold(self) -> None:
        ray = _module("ray")
        demand = self._demand()
        name = f"skyward-{self._order['pool']}-{self._order['first']}"
        self._group = _module("ray.util").placement_group(
            [demand] * self._order["count"], strategy=self._order["strategy"], name=name
        )
        self._await_group(demand)
        bundles = [Bundle(index, self._order["first"] + index) for index in range(self._order["count"])]
        say({"placed": len(bundles), "head": _module("ray.util").get_node_ip_address()})
        looked = 0.0
        while self._waits or any(bundle.due is not None for bundle in bundles):
            now = time.monotonic()
            for bundle in bundles:
                if bundle.due is not None and bundle.due <= now:
                    self._start(bundle, demand)
            if not self._waits:
                time.sleep(0.2)
                continue
            done: list[Any] = ray.wait(list(self._waits), timeout=0.5)[0]
            for ref in done:
                self._settle(ref, *self._waits.pop(ref))
            if now - looked > _LOOK:
                looked = now
                self._look_for_drains(bundles)
        say({"over": True})

    def finish(self, code: int) -> None:
        if not self._finishing.acquire(blocking=False):
            return
        try:
            threading.Timer(5.0, os._exit, [code]).start()  # Ray may not answer
            if self._group is not None:
                _module("ray.util").remove_placement_group(self._group)
        finally:
            os._exit(code)

    def on_sigterm(self, number: int, frame: Any) -> None:
        self.finish(0)

    def until_input_ends(self) -> None:
        while sys.stdin.readline():
            pass
        self.finish(0)

    def _demand(self) -> dict[str, float]:
        known = {name for node in _nodes() for name in node["resources"]}
        fitting = [name for name in self._order["types"] if name in known]
        return {**self._order["resources"], **dict.fromkeys(fitting[:1], 0.001)}

    def _await_group(self, demand: dict[str, float]) -> None:
        began, last, due = time.monotonic(), "", 0.0
        known: list[dict[str, Any]] = []
        while not self._group.wait(0.5):
            state = _module("ray.util").placement_group_table(self._group)["stats"]["scheduling_state"]
            hopeless = state == "INFEASIBLE" and time.monotonic() - began > _INFEASIBLE
            if hopeless and not self._order["autoscaling"]:
                say({"infeasible": demand, "nodes": _nodes()})
                self.finish(1)
            if state != last:
                say({"waiting": state, "nodes": _nodes()})
            last = state
            if time.monotonic() >= due and (free := _free(demand)) != known:
                say({"free": free})
                # seldom later on: the client reads all lines again and again
                known, due = free, time.monotonic() + max(5.0, (time.monotonic() - began) / 20)

    def _start(self, bundle: Bundle, demand: dict[str, float]) -> None:
        ray, strategies = _module("ray"), _module("ray.util.scheduling_strategies")
        rest = {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU", "memory")}
        strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle.index)
        # all of the bundle: an actor that asks for no GPU sees every GPU of its machine
        bundle.actor = ray.remote(Joiner).options(
            num_cpus=demand.get("CPU", 0), num_gpus=demand.get("GPU", 0), memory=demand.get("memory"), resources=rest,
            scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, max_concurrency=3,
            name=f"skyward-{self._order['pool']}-{bundle.index}-{time.monotonic_ns()}",
        ).remote()  # fmt: skip
        bundle.due, bundle.node = None, ""
        ref = bundle.actor.start.remote(bundle.place, self._order["program"], self._order["text"])
        self._waits[ref] = bundle, "start"

    def _settle(self, ref: Any, bundle: Bundle, what: str) -> None:
        ray = _module("ray")
        try:
            result = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:  # its machine does not answer: Ray says soon whether it is lost
            if what == "wait":
                self._waits[bundle.actor.wait.remote()] = bundle, "wait"
                return
            why = "the machine did not answer"
        except ray.exceptions.RayError as exc:
            why = reason(str(exc))
        else:
            if what == "start":
                bundle.node, bundle.began = result["node"], time.monotonic()
                say({"started": bundle.index, **result})
                self._waits[bundle.actor.wait.remote()] = bundle, "wait"
                return
            code, said = result
            if code == 0:  # the client has sent it away
                say({"ended": bundle.index, "why": ""})
                ray.kill(bundle.actor)
                return
            why = said or f"it ended with status {code}"
            bundle.leaving = bundle.leaving or "the pool is gone" in said  # its client died
        ray.kill(bundle.actor)
        self._again(bundle, why)

    def _again(self, bundle: Bundle, why: str) -> None:
        lasted = bundle.began and time.monotonic() - bundle.began > _LASTING
        bundle.failures = 0 if lasted else bundle.failures + 1
        bundle.began = 0.0
        given_up = bundle.leaving or bundle.failures > len(_PAUSES)
        bundle.due = None if given_up else time.monotonic() + _PAUSES[max(0, bundle.failures - 1)]
        say({"ended": bundle.index, "why": why, "given_up": given_up})

    def _look_for_drains(self, bundles: list[Bundle]) -> None:
        try:
            draining = _module("ray._private.state").state.get_draining_nodes()
        except Exception:  # an older or newer Ray: then a node is lost without a notice
            return
        for bundle in bundles:
            if bundle.node in draining and bundle.node not in self._draining:
                self._draining.append(bundle.node)
                bundle.leaving = True
                left = max(0.0, draining[bundle.node] / 1000 - time.time()) if draining[bundle.node] else _GRACE
                say({"draining": bundle.index, "seconds": left})
                bundle.actor.warn.remote(left)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _nodes() -> list[dict[str, Any]]:
    hidden = ("node:", "object_store_memory")
    alive: list[dict[str, Any]] = [node for node in _module("ray").nodes() if node["Alive"]]
    return [
        {
            "address": node["NodeManagerAddress"],
            "resources": {name: amount for name, amount in node["Resources"].items() if not name.startswith(hidden)},
        }
        for node in alive
    ]


def _free(demand: dict[str, float]) -> list[dict[str, Any]]:
    try:
        found: dict[str, dict[str, float]] = _module("ray._private.state").available_resources_per_node()
    except Exception:  # an older or newer Ray: then it is not said
        return []
    names = [name for name in demand if not name.startswith("accelerator_type:")]
    nodes = [
        {
            "address": node["NodeManagerAddress"],
            "resources": {name: node["Resources"].get(name, 0.0) for name in names},
            "free": {name: found.get(node["NodeID"], {}).get(name, 0.0) for name in names},
        }
        for node in _module("ray").nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: ([-node["free"][name] for name in names], node["address"]))[:_SHOWN]


if __name__ == "__main__":
    main()

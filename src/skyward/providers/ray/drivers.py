"""The driver of a pool as the client has it: a job on the head, or a process beside us on a node of the cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from skyward.errors import InvalidArgument
from skyward.providers.ray.jobs import ENDED, Jobs, RayRefused
from skyward.providers.ray.reports import DriverReport, read_reports

__all__ = ["BesideDriver", "Driver", "JobDriver", "driver_source"]

_LINES = 15
_HASTE = 5.0
_FOR_RAY = ("RAY_ADDRESS", "RAY_AUTH_", "RAY_TLS_", "RAY_USE_TLS")


def driver_source() -> str:
    """The program that runs on the cluster."""
    return Path(__file__).with_name("driver.py").read_text()


class Driver(Protocol):
    """What holds places of a pool on a cluster."""

    def report(self) -> DriverReport:
        """How far it is."""
        ...

    def glance(self) -> DriverReport:
        """The same, and whether it has ended, as far as that can be known without waiting."""
        ...

    def ended(self) -> str:
        """Why it has ended, with the last lines that it printed; empty while it runs."""
        ...

    def stop(self, seconds: float) -> None:
        """Ends it, and with it its places; returns when it is gone."""
        ...


@dataclass(frozen=True)
class JobDriver:
    """A driver that runs on the head, as a job."""

    jobs: Jobs
    id: str

    def report(self) -> DriverReport:
        return read_reports(self.jobs.log(self.id).splitlines())

    def glance(self) -> DriverReport:
        quick = replace(self, jobs=replace(self.jobs, timeout=_HASTE))
        try:
            return replace(quick.report(), ended=_first(quick.ended()))
        except RayRefused:
            return DriverReport()  # asked again

    def ended(self) -> str:
        job = self.jobs.job(self.id)
        if job is None:
            return f"Ray knows no job {self.id} any more"
        if job["status"] not in ENDED:
            return ""
        return _words(f"the job {self.id} is {job['status']}", str(job.get("message", "")), self.jobs.log(self.id))

    def stop(self, seconds: float) -> None:
        self.jobs.stop(self.id, seconds)


class BesideDriver:
    """A driver that runs as a process beside the client, and ends with it: its standard input is the client's."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise InvalidArgument(
                f"address={order['address']!r} is a cluster that this program is to connect to by itself, and Ray is "
                "not installed here. Install the Ray that the cluster has (the extra `ray`), or give the address of "
                'its Jobs API, for which nothing is needed here: sky.Ray(address="http://<head>:8265").'
            )
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {name: value for name, value in os.environ.items() if name.startswith(_FOR_RAY)}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            start_new_session=True,  # Ctrl-C in our terminal is for us
        )
        assert self._process.stdin is not None
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._read, name="skyward-ray", daemon=True)
        self._reading.start()
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and `ended` says why

    def report(self) -> DriverReport:
        return read_reports(list(self._lines))

    def glance(self) -> DriverReport:
        return replace(self.report(), ended=_first(self.ended()))

    def ended(self) -> str:
        if self._process.poll() is None:
            return ""
        self._reading.join(5)
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace")
        return _words(f"the driver ended with status {self._process.returncode}", self.report().failed, said)

    def stop(self, seconds: float) -> None:
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # Ray ends what a driver had that was killed
            process.wait()
        self._reading.join(5)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.decode("utf-8", "replace"))


def _words(what: str, message: str, log: str) -> str:
    """What has happened to a driver, with the last lines of its log, which hold no secret: it prints none."""
    first = _first(message.strip())
    last = [line for line in log.strip().splitlines() if not line.startswith("skyward: ")][-_LINES:]
    said = "".join(f"\n  {line}" for line in last)
    return f"{what}{f': {first}' if first else ''}" + (f"\nIts last lines:{said}" if said else "")


def _first(text: str) -> str:
    return text.partition("\n")[0]

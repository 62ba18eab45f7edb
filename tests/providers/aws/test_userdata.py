"""AWS: what a machine does by itself: its host key, and its end when nobody renews the lease."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.errors import InvalidArgument
from skyward.machines.cloud import LEASE_FILE, lease_script, user_data
from tests.support.waiting import until


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Runs a script whose `shutdown` leaves a mark, as a machine would run it; gives the mark."""
    programs = tmp_path / "bin"
    programs.mkdir()
    mark = tmp_path / "shut-down"
    shutdown = programs / "shutdown"
    shutdown.write_text(f'#!/bin/sh\necho "$@" >> {mark}\n')
    shutdown.chmod(0o755)
    running: list[subprocess.Popen[bytes]] = []

    def boots(script: str) -> Path:
        path = tmp_path / "lease.sh"
        path.write_text(script.replace(LEASE_FILE, str(tmp_path / "run" / "lease")))
        env = {"PATH": f"{programs}:{os.environ['PATH']}"}
        running.append(subprocess.Popen(["sh", str(path)], env=env, start_new_session=True))
        return mark

    yield boots
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=120)


def test_a_machine_ends_itself_when_nobody_renews_its_lease(machine: Callable[[str], Path]) -> None:
    """SEC-31."""
    mark = machine(lease_script(1, 3600))
    until(lambda: mark.exists() and "\n" in mark.read_text())  # the shell makes the file before it writes to it
    assert mark.read_text().splitlines()[0] == "-P now", "power off, never halt"


def test_a_lease_that_is_renewed_keeps_the_machine(machine: Callable[[str], Path], tmp_path: Path) -> None:
    """SEC-31: and once renewing ends, the machine does."""
    mark = machine(lease_script(5, 3600))
    lease = tmp_path / "run" / "lease"
    until(lease.exists)
    assert lease.stat().st_mode & 0o777 == 0o666, "whoever runs the agent may renew"
    began = time.monotonic()
    while time.monotonic() - began < 7:
        os.utime(lease)
        time.sleep(0.05)
    assert not mark.exists()
    until(mark.exists)


def test_a_machine_ends_itself_at_once_when_its_keeper_says_so(machine: Callable[[str], Path], tmp_path: Path) -> None:
    mark = machine(lease_script(3600, 3600))
    lease = tmp_path / "run" / "lease"
    until(lease.exists)
    assert not mark.exists()
    lease.write_text("end\n")
    until(mark.exists)


def test_a_machine_ends_itself_at_the_end_of_its_life_however_often_it_is_renewed(
    machine: Callable[[str], Path], tmp_path: Path
) -> None:
    mark = machine(lease_script(3600, 2))
    lease = tmp_path / "run" / "lease"
    until(lease.exists)

    def renewed() -> bool:
        os.utime(lease)
        return mark.exists()

    until(renewed)


def test_a_lease_file_that_is_deleted_does_not_keep_the_machine(machine: Callable[[str], Path], tmp_path: Path) -> None:
    mark = machine(lease_script(1, 3600))
    lease = tmp_path / "run" / "lease"
    until(lease.exists)
    lease.unlink()
    until(mark.exists)


def test_the_user_data_is_cloud_config_with_the_timer_first() -> None:
    text = user_data("PRIVATE", "ssh-ed25519 AAAA", 900, 86400.5)
    head, _, body = text.partition("\n")
    assert head == "#cloud-config"
    settings = json.loads(body)
    assert next(iter(settings)) == "bootcmd", "before anything else"
    (((shell, flag, arm)),) = settings["bootcmd"]
    assert (shell, flag) == ("sh", "-c")
    assert "systemd-run --no-block --unit=skyward-lease" in arm
    assert "--on-active=86401" in arm
    assert "setsid sh /run/skyward/lease.sh" in arm
    assert settings["ssh_keys"] == {"ed25519_private": "PRIVATE", "ed25519_public": "ssh-ed25519 AAAA"}
    assert settings["ssh_pwauth"] is False
    assert "python" not in text.lower(), "independent of Python"


def test_the_arming_is_shell_that_every_shell_reads(tmp_path: Path) -> None:
    settings = json.loads(user_data("x", "y", 900, 3600).partition("\n")[2])
    for script in (settings["bootcmd"][0][2], lease_script(900, 3600)):
        subprocess.run(["sh", "-n"], input=script.encode(), check=True, timeout=180)
        subprocess.run(["bash", "-n"], input=script.encode(), check=True, timeout=180)


def test_user_data_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="16384"):
        user_data("x" * 20_000, "y", 900, 3600)


def test_nothing_that_is_started_at_boot_waits_for_the_boot() -> None:
    """A unit with default dependencies waits for sysinit.target, and that for cloud-init, which runs this."""
    arm = json.loads(user_data("private", "public", 900, 3600).split("\n", 1)[1])["bootcmd"][0][-1]
    started = re.findall(r"^ *systemd-run(?:.*\\\n)*.*", arm, re.MULTILINE)
    assert len(started) == 2
    for command in started:
        assert "--no-block" in command
        kind = "--timer-property=" if "--on-active" in command else "-p "
        assert f"{kind}DefaultDependencies=no" in command

"""AWS: what real cloud-init and systemd say of the user data, in seconds; `make test-vm` boots Ubuntu with the same."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from skyward.api.spec import Spec
from tests.support import cloud_init
from tests.support.cloud import Cloud
from tests.support.userdata import check, keep, settings

CYCLE = "ordering cycle"
STAGES = ["cloud-init-local.service", "cloud-init-network.service", "cloud-init.service"]


@pytest.fixture
def user_data(cloud: Cloud) -> str:
    """What a machine of a pool is launched with, as the cloud has received it."""
    cloud.aws().acquire(Spec(nodes=1), "p")
    (instance,) = cloud.running()
    return instance.user_data


@pytest.fixture
def at_boot(user_data: str, tmp_path: Path) -> Callable[[], list[list[str]]]:
    """Runs the commands of the boot with programs that only note how they were called; gives those calls."""
    programs, noted, run = tmp_path / "bin", tmp_path / "noted", tmp_path / "run"
    programs.mkdir()
    (run / "systemd" / "system").mkdir(parents=True)
    for name in ("systemd-run", "systemctl", "service", "shutdown", "initctl"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" "" | sed "s/^$/./" >> {noted}\n')
        (programs / name).chmod(0o755)

    def boot() -> list[list[str]]:
        for command in settings(user_data)["bootcmd"]:
            here = [word.replace("/run/", f"{run}/") for word in command]
            env = {"PATH": f"{programs}:{os.defpath}"}
            subprocess.run(here, env=env, check=True, timeout=60, stdin=subprocess.DEVNULL)
        return [call.splitlines() for call in noted.read_text().split("\n.\n") if call]

    return boot


def test_what_is_launched_is_what_is_checked_here_and_booted_for_real(user_data: str) -> None:
    """tests/vm asks the same of every machine before it boots it. SKYWARD_GOLDEN=1 writes the text again."""
    if os.environ.get("SKYWARD_GOLDEN"):
        keep(user_data)
    check(user_data)


def test_a_change_of_the_user_data_is_noticed(user_data: str) -> None:
    with pytest.raises(AssertionError, match="make test-vm"):
        check(user_data.replace("Restart=always", "Restart=no"))
    check(user_data.replace("lease=900", "lease=30"))


def test_cloud_init_finds_nothing_wrong_with_the_user_data(user_data: str, tmp_path: Path) -> None:
    if reason := cloud_init.unavailable():
        pytest.skip(reason)
    assert cloud_init.schema(user_data, tmp_path) == ""
    wrong = user_data.replace('"package_update": false', '"package_update": "perhaps"')
    assert "'perhaps' is not of type 'boolean'" in cloud_init.schema(wrong, tmp_path), "it does look"


def test_no_command_at_boot_waits_for_a_job_of_systemd(at_boot: Callable[[], list[list[str]]]) -> None:
    """Jobs wait for cloud-init, and cloud-init for its commands: the machine would never finish its boot."""
    calls = at_boot()
    assert [call[0] for call in calls] == ["systemd-run"] * 2
    assert all("--no-block" in call for call in calls)


def test_systemd_starts_what_the_boot_asks_for_while_cloud_init_runs(
    at_boot: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    """Even if the commands waited for their units, there would be no cycle; with default dependencies there is one."""
    if reason := cloud_init.unavailable():
        pytest.skip(reason)
    calls = at_boot()
    assert CYCLE not in verified(calls, tmp_path / "as-it-is")
    usual = [_with_default_dependencies(call) for call in calls]
    assert CYCLE in verified(usual, tmp_path / "usual"), "it does look"


def _with_default_dependencies(call: Sequence[str]) -> list[str]:
    words = (
        " ".join(call).replace("-p DefaultDependencies=no ", "").replace("--timer-property=DefaultDependencies=no ", "")
    )
    return words.split(" ")


def verified(calls: Sequence[Sequence[str]], directory: Path) -> str:
    """What systemd says of the units that these calls make, if cloud-init, which makes them, waits for them."""
    directory.mkdir()
    made = {name: text for call in calls for name, text in units(call).items()}
    started = [name for name in made if name.endswith(".timer") or name.replace(".service", ".timer") not in made]
    stages = [name for name in STAGES if (cloud_init.units() / name).exists()]
    for stage in stages:
        (directory / f"{stage}.d").mkdir()
        wait = "".join(f"Wants={name}\nAfter={name}\n" for name in started)
        (directory / f"{stage}.d" / "waits.conf").write_text(f"[Unit]\n{wait}")
    for name, text in made.items():
        (directory / name).write_text(text)
    path = f"{directory}:{cloud_init.units()}:/lib/systemd/system:/usr/lib/systemd/system"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *started, *stages],
        env={"PATH": os.defpath, "SYSTEMD_UNIT_PATH": path, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for name in made:
        assert f"{name}: Unknown" not in done.stderr
        assert f"{name}:1: " not in done.stderr
    return done.stderr


def units(call: Sequence[str]) -> dict[str, str]:
    """The units that a call of systemd-run makes, as files; an option that is not known here fails."""
    words = list(call[1:])
    name, unit, service, timer = "", [""], [""], list[str]()
    while words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "-p":
            value = words.pop(0)
        match option:
            case "--no-block":
                pass
            case "--unit":
                name = value
            case "-p":
                (unit if value.startswith("DefaultDependencies") else service).append(value)
            case "--on-active":
                timer += ["[Timer]", f"OnActiveSec={value}"]
            case "--timer-property":
                unit.append(value)
            case _:
                pytest.fail(f"this test does not know what {option} of systemd-run means")
    command = shlex.join(words).replace("%", "%%").replace("$", "$$")
    run = "\n".join(["[Service]", *service, f"ExecStart={command}", ""])
    head = "\n".join(["[Unit]", *unit, ""])
    if not timer:
        return {f"{name}.service": head + run}
    return {f"{name}.service": run, f"{name}.timer": head + "\n".join([*timer, ""])}

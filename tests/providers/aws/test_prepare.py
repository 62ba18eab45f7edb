"""AWS: local disks are mounted and the fabric manager is waited for, by the scripts that machines run."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.providers.aws.keys import FABRIC, LOCAL_DISK

ID = "i-0123456789abcdef0"
_LINK = "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS1234567890"


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    """A disk of 64 MB that is a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop devices here: {made.stderr.strip()}")
    yield made.stdout.strip()
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


class Computer:
    """A home, a list of disks, and an id; what is mounted is seen by the script and by `then` alone."""

    def __init__(self, place: Path) -> None:
        self.home, self.disks, self.dmi = place / "home", place / "by-id", place / "dmi"
        self.base, self.own = place / "dlami", place / "own"
        for path in (self.home, self.disks, self.dmi):
            path.mkdir()
        (self.dmi / "board_asset_tag").write_text(f"{ID}\n")

    def run(self, then: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        arguments = [ID, self.disks, self.base, self.own, self.dmi]
        script = f"( {LOCAL_DISK}\n)\ncode=$?\n{textwrap.dedent(then)}\nexit $code"
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *map(str, arguments)]
        known = {**os.environ, "HOME": str(self.home), **env}
        known.pop("SKYWARD_CACHE", None) if "SKYWARD_CACHE" not in env else None
        return subprocess.run(command, capture_output=True, text=True, env=known, timeout=60)


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    return Computer(tmp_path)


def test_a_blank_local_disk_is_formatted_and_holds_the_cache(computer: Computer, disk: str) -> None:
    (computer.disks / _LINK).symlink_to(disk)
    (computer.disks / f"{_LINK}_1").symlink_to(disk)  # udev has two names for it
    done = computer.run("""
        stat -c %a "$HOME/.cache/skyward"
        findmnt -no SOURCE,FSTYPE -T "$HOME/.cache/skyward"
        touch "$HOME/.cache/skyward/kept"
        ls -d "$4"/skyward-*/tmp "$4"/skyward-*/cache/kept | wc -l
    """)
    assert done.returncode == 0, done.stderr
    place, mode, mounted, files = done.stdout.split("\n")[:4]
    assert place.startswith(f"{computer.own}/skyward-")
    assert mode == "700"
    assert mounted.split()[0].startswith(disk)
    assert mounted.split()[1] == "ext4"
    assert files == "2"
    again = computer.run("true")
    assert again.stdout == "", "a disk with something on it is left alone"


def test_no_disk_of_another_computer_is_touched(computer: Computer, disk: str) -> None:
    """The script is harmless wherever it is run by mistake: the id is that of the machine that was launched."""
    (computer.disks / _LINK).symlink_to(disk)
    (computer.dmi / "board_asset_tag").write_text("i-0aaaaaaaaaaaaaaaa\n")
    assert computer.run().stdout == ""
    (computer.dmi / "board_asset_tag").unlink()
    done = computer.run()
    assert (done.returncode, done.stdout) == (0, "")
    assert not subprocess.run(["blkid", "-p", disk], capture_output=True).stdout, "still blank"


def test_without_local_disks_nothing_is_done(computer: Computer) -> None:
    done = computer.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (computer.home / ".cache").exists()


def test_where_the_image_mounts_them_its_directory_is_used(computer: Computer, disk: str) -> None:
    (computer.disks / _LINK).symlink_to(disk)
    (computer.base / "nvme").mkdir(parents=True)
    program(computer.base / "bin", "mountpoint", f'[ "$2" = "{computer.base}/nvme" ]')
    done = computer.run(PATH=f"{computer.base}/bin:{os.environ['PATH']}", SKYWARD_CACHE="/elsewhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{computer.base}/nvme/skyward-")
    assert not (computer.home / ".cache").exists(), "the user has said where it is"


def test_an_environment_that_the_image_brings_is_not_hidden(computer: Computer, disk: str) -> None:
    (computer.disks / _LINK).symlink_to(disk)
    (computer.home / ".cache" / "skyward" / "envs" / "abc").mkdir(parents=True)
    done = computer.run('ls "$HOME/.cache/skyward/envs"')
    assert done.stdout.splitlines()[1:] == ["abc"]


@pytest.mark.parametrize(
    ("kind", "active", "fabric", "code", "words"),
    [
        ("g5.xlarge", "inactive", "", 0, ""),
        ("p5.4xlarge", "inactive", "", 0, ""),
        ("p4d.24xlarge", "active", "[N/A]", 0, ""),
        ("p5.48xlarge", "active", "Completed", 0, ""),
        ("p5en.48xlarge", "active", "In Progress", 1, "active, but the fabric is not ready"),
        ("p4de.24xlarge", "failed", "", 1, "nvidia-fabricmanager is failed"),
        ("p6-b200.48xlarge", "inactive", "", 1, "nvidia-fabricmanager is inactive"),
    ],
)
def test_gpus_behind_switches_are_waited_for(
    tmp_path: Path, kind: str, active: str, fabric: str, code: int, words: str
) -> None:
    """CUDA fails with error 802 before."""
    (tmp_path / "product_name").write_text(f"{kind}\n")
    program(tmp_path / "bin", "systemctl", f'[ "$1" = is-active ] && echo "{active}"')
    program(tmp_path / "bin", "nvidia-smi", f'echo "{fabric}"')
    program(tmp_path / "bin", "sleep", "true")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["sh", "-c", FABRIC, "sh", str(tmp_path / "product_name"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=60)
    assert done.returncode == code
    assert words in done.stderr

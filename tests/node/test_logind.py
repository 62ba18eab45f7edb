"""What is refused before a detached run is submitted."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from skyward.node.logind import ends_at_logout


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A computer with systemd, of a user who is not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    return tmp_path


def test_a_computer_that_ends_processes_at_logout_is_noticed(root: Path) -> None:
    (root / "etc/systemd/logind.conf").write_text("[Login]\n#KillUserProcesses=yes\n")
    assert not ends_at_logout(root)
    (root / "etc/systemd/logind.conf.d/site.conf").write_text("[Login]\nKillUserProcesses=yes\n")
    assert ends_at_logout(root)


def test_a_user_whose_processes_may_linger_has_nothing_to_fear(root: Path) -> None:
    (root / "etc/systemd/logind.conf").write_text("KillUserProcesses=yes\n")
    (root / "var/lib/systemd/linger" / getpass.getuser()).touch()
    assert not ends_at_logout(root)


def test_without_systemd_nothing_ends_at_logout(tmp_path: Path) -> None:
    assert not ends_at_logout(tmp_path)

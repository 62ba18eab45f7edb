"""What programs that we start see of the user's environment (SEC-13)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from skyward.api.secret import installer_environment, ssh_environment
from skyward.api.shell import SshTarget
from skyward.errors import HostUnreachable, SkywardError
from skyward.machines.watchdog import Watchdog
from skyward.setup.local_shell import LocalShell
from skyward.setup.ssh.shell import SshShell
from tests.support.waiting import until

SECRETS = (
    "HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN OPENAI_API_KEY wandb_api_key MYSQL_PWD GH_PAT "
    "UV_PUBLISH_TOKEN UV_PUBLISH_PASSWORD GOOGLE_APPLICATION_CREDENTIALS npm_config__auth SENTRY_DSN SSH_PASSPHRASE"
).split()
NEEDED = (
    "PATH HOME USER LANG LC_ALL TMPDIR http_proxy HTTPS_PROXY no_proxy SSL_CERT_FILE REQUESTS_CA_BUNDLE NETRC UV_INDEX "
    "UV_DEFAULT_INDEX UV_KEYRING_PROVIDER UV_INDEX_MINE_PASSWORD PIP_CONFIG_FILE PIP_CERT XDG_CONFIG_HOME CC CUDA_HOME"
).split()


def test_installers_get_settings_proxies_and_certificates_and_nothing_else() -> None:
    """SEC-13."""
    environ = dict.fromkeys((*SECRETS, *NEEDED, "EDITOR", "DATABASE_URL", "PYTHONPATH", "SSH_AUTH_SOCK"), "x")
    assert installer_environment(environ) == dict.fromkeys(NEEDED, "x")


def test_git_gets_what_it_logs_in_with_where_a_package_comes_from_a_repository() -> None:
    names = ("GIT_SSH_COMMAND", "GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0", "SSH_AUTH_SOCK")
    environ = dict.fromkeys((*names, *SECRETS), "x")
    assert installer_environment(environ, repositories=True) == dict.fromkeys(names, "x")


def test_ssh_gets_all_but_what_looks_like_a_secret() -> None:
    """Its own settings may start any program, such as one that leads to a host."""
    kept = ("PATH", "SSH_AUTH_SOCK", "KRB5CCNAME", "DISPLAY", "PWD", "EDITOR", "AWS_PROFILE")
    environ = dict.fromkeys((*kept, *SECRETS), "x")
    assert ssh_environment(environ) == dict.fromkeys(kept, "x")
    addresses = {"DATABASE_URL": "postgres://me:pw@host/db", "SERVER": "ssh://host:22/", "https_proxy": "http://a:b@c"}
    assert ssh_environment(addresses).keys() == {"SERVER", "https_proxy"}


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file into which an `ssh` on the path writes its environment."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    code = f"import json, os\nopen({str(tmp_path / 'seen')!r}, 'a').write(json.dumps(dict(os.environ)) + '\\n')\n"
    program.write_text(f"#!{sys.executable} -IS\n{code}raise SystemExit(255)\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("EDITOR", "ed")
    return tmp_path / "seen"


def environments(seen: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in seen.read_text().splitlines()]


def test_the_ssh_that_connects_sees_no_secret(seen: Path) -> None:
    """SEC-13."""
    shell = SshShell(SshTarget("host.invalid"))
    with pytest.raises((HostUnreachable, SkywardError)):
        shell.connect(time.monotonic() + 3)
    shell.close()
    assert all("HF_TOKEN" not in each and each["EDITOR"] == "ed" for each in environments(seen))


def test_the_ssh_that_the_watchdog_starts_sees_no_secret(seen: Path) -> None:
    """SEC-13."""
    watchdog = Watchdog()
    watchdog.add("a", [], ["ssh", "host.invalid"])
    watchdog.hand_over()
    watchdog.close()
    until(seen.exists)
    until(lambda: seen.read_text().endswith("\n"))
    assert all("HF_TOKEN" not in each and each["EDITOR"] == "ed" for each in environments(seen))


def test_commands_of_plugins_on_this_computer_see_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-13: they get what nodes here get, and the settings of pip and uv: such commands install things."""
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://index.example.org/simple")
    done = LocalShell().run(["env"])
    seen = dict(line.partition("=")[::2] for line in done.out.decode().splitlines())
    assert "HF_TOKEN" not in seen
    assert seen["UV_DEFAULT_INDEX"] == "https://index.example.org/simple"
    assert {"PATH", "HOME"} <= seen.keys()

"""What hosts are told: the script's text, its behaviour under sh with programs that play their part, its secrets.

uv is played by a small script, so that each step can be looked at, cut off and repeated in a moment; the real one is
in tests/setup/env/test_remote.py.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward.api.image import Image, PipIndex
from skyward.errors import BootstrapError
from skyward.setup.env.requirements import Pin, read_pylock, strip_login
from skyward.setup.env.script import environment_key, look_script, recipe, script, settings_text, stop_script
from tests.support.waiting import until

GOLDEN = Path(__file__).parent / "golden"
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]
KEY = "0123456789abcdef01234567"
PLATFORM = "x86_64-manylinux_2_34"
PINS = (
    Pin("skyward", "skyward==0.1.0", ("5" * 64,), file="/client/built/skyward-0.1.0-py3-none-any.whl"),
    Pin("cowsay", "cowsay==6.1", ("1" * 64, "2" * 64), "python_version < '4'"),
    Pin("inner", "inner==2.0", ("3" * 64,)),
    Pin("tool", "tool @ git+https://example.org/tool.git@c0ffee"),
)
INDEXES = (
    PipIndex("https://me:hunter%2F2@index.example.org/simple", ["inner"]),
    PipIndex("file:///srv/index", ["gone"]),
)

# Plays uv: each order leaves a file, and may wait or fail as the file `orders/<name>` says.
UV = """#!/bin/sh
case "$1 $2" in
    --version*) echo 'uv 0.13.99'; exit ;;
    'python find') order=find ;; 'python install') order=python ;;
    'pip install') order=install ;; *) order=$1 ;;
esac
here=$(dirname "$0")/../orders
case "$*" in *--offline*) exit 1 ;; esac
echo "$*" >>"$here/$order.seen"
env -0 >"$here/$order.env" 2>/dev/null || env >"$here/$order.env"
[ ! -f "$here/$order" ] || . "$here/$order"
case $order in
    find) echo "$PLAYED_PYTHON" ;;
    venv) for work; do :; done; mkdir -p "$work/bin" && ln -s "$PLAYED_PYTHON" "$work/bin/python" ;;
esac
"""


@dataclass
class Played:
    """A host in a directory: its home, and programs that are played."""

    root: Path
    shell: str = "sh"

    @property
    def cache(self) -> Path:
        return self.root / "home" / ".cache" / "skyward"

    @property
    def orders(self) -> Path:
        return self.cache / "orders"

    def env(self, **more: str) -> dict[str, str]:
        return {
            "HOME": str(self.root / "home"),
            "PATH": f"{self.root}/programs:{os.environ['PATH']}",
            "PLAYED_PYTHON": sys.executable,
            "SKYWARD_TEST_RUN": os.environ["SKYWARD_TEST_RUN"],
            **more,
        }

    def program(self, name: str, text: str) -> None:
        path = self.root / "programs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)

    def stage(self, text: str) -> Path:
        """A staging directory with a script and a played uv in it, as if sent."""
        (self.cache / "stage").mkdir(parents=True, exist_ok=True)
        self.orders.mkdir(exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=self.cache / "stage"))
        (stage / "setup.sh").write_text(text)
        (stage / "uv").write_text(UV)
        for name in ("pyproject.toml", "requirements.txt", "packages.txt"):
            (stage / name).write_text(f"{name}\n")
        return stage

    def start(
        self, image: Image | None = None, told: str = "", need: int = 1, user: int | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        stage = self.stage(script(image or Image(), "0.13.99"))
        process = subprocess.Popen(
            [*self.shell.split(), str(stage / "setup.sh"), str(stage), "T", "p", KEY, str(need), "hold"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self.env(**env), start_new_session=True, umask=0, user=user, group=user,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write("{}\n{}".format(told.count("\n"), told).encode("utf-8", "surrogateescape"))
        process.stdin.flush()
        return process

    def run(
        self, image: Image | None = None, told: str = "", need: int = 1, user: int | None = None, **env: str
    ) -> tuple[int, list[str]]:
        """The exit status, and the lines that were said, without their mark."""
        process = self.start(image, told, need, user, **env)
        assert process.stdout is not None
        # The pipe stays open: it is not its end that lets the script come to its own.
        out = process.stdout.read()
        code = process.wait(60)
        close(process)
        assert not self.stages()
        return code, [line.removeprefix("@T ") for line in out.decode("utf-8", "replace").splitlines()]

    def look(
        self, *pairs: str, apt: str = "", tools: str = "tar", need: int = 1, user: int | None = None, **env: str
    ) -> list[str]:
        order = [*self.shell.split(), "-c", look_script("0.13.99"), "sky", "T", "p", str(need), apt, tools, *pairs]
        done = subprocess.run(
            order, env=self.env(**env), capture_output=True, text=True, timeout=30, umask=0, user=user, group=user
        )
        assert done.stderr == ""
        return [line.removeprefix("@T ") for line in done.stdout.splitlines()]

    @property
    def platform(self) -> str:
        said = self.look()
        for left in self.stages():
            shutil.rmtree(left)
        return next(line.removeprefix("platform ") for line in said if line.startswith("platform "))

    def stages(self) -> list[Path]:
        return list((self.cache / "stage").glob("*"))


def close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


def processes_of(group: int) -> list[int]:
    """Those that are still alive in a process group."""
    alive: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


@pytest.fixture
def played(tmp_path: Path) -> Played:
    (tmp_path / "home").mkdir()
    return Played(tmp_path)


# ------------------------------------------------------------------------------------------------------- as texts


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("minimal", Image(python="3.11")),
        ("packages", Image(python="3.12", pip=["torch>=2", "humanize"], apt=["git", "libfoo=1:2.0~rc1"])),
        ("repository", Image(python="3.13", pip=["tool @ git+https://me:hunter2@example.org/tool.git"])),
    ],
)
def test_the_script_reads_as_it_did(name: str, image: Image) -> None:
    """Golden files: what `sky script` prints, and how other images differ. SKYWARD_GOLDEN=1 writes them again."""
    text = script(image, "0.0.0")
    assert "hunter2" not in text
    path = GOLDEN / f"{name}.sh"
    if name != "minimal":
        minimal = script(Image(python="3.11"), "0.0.0")
        text = "".join(difflib.unified_diff(minimal.splitlines(True), text.splitlines(True), "minimal", name, n=0))
        path = GOLDEN / f"{name}.diff"
    if os.environ.get("SKYWARD_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_the_files_that_go_with_it_read_as_they_did() -> None:
    """SEC-11, SEC-26, SEC-28: exact versions with hashes; passwords only in what goes by standard input."""
    image = Image(python="3.11", pip=["tool @ git+https://me:s3cret@example.org/tool.git"], pip_indexes=INDEXES)
    user = {
        "UV_DEFAULT_INDEX": "https://me:pa55@mirror.example.org/simple",
        "HOME": "/client",
        "UV_CACHE_DIR": "/client",
    }
    made = recipe(image, PINS, PLATFORM, "/home/a b/.cache/skyward", user, "0.0.0")
    text = "".join(f"===== {name}\n{content}" for name, content in {**made.files, "settings": made.settings}.items())
    path = GOLDEN / "files.txt"
    if os.environ.get("SKYWARD_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert not re.search("hunter|s3cret|pa55", f"{made.files}{made.script}{made!r}")
    assert [file.sent_as for file in made.carried] == ["5555555555555555,skyward-0.1.0-py3-none-any.whl"]
    project = tomllib.loads(made.files["pyproject.toml"])
    assert project["project"]["dependencies"] == ["inner==2.0"]
    wheels = "--only-binary :all:"
    assert f"\ntools=git\nstrict='--no-deps {wheels} --no-binary tool'\n" in made.script
    all_hashed = recipe(image, PINS[:3], PLATFORM, "/x", {}, "0.0.0").script
    assert f"\ntools=''\nstrict='--no-deps --require-hashes {wheels}'\n" in all_hashed
    unhashed = recipe(image, [Pin("a", "a==1")], PLATFORM, "/x", {}, "0.0.0").script
    assert f"\nstrict='--no-deps {wheels}'\n" in unhashed
    asked = Image(build=["cowsay"])
    assert f"{wheels} --no-binary cowsay'" in recipe(asked, PINS[:2], PLATFORM, "/x", {}, "0.0.0").script
    sent = Pin("cowsay", "cowsay==6.1", ("1" * 64,), file="/client/built/cowsay-6.1-py3-none-any.whl")
    assert "--no-binary" not in recipe(asked, [sent], PLATFORM, "/x", {}, "0.0.0").script


def test_the_key_follows_what_is_installed() -> None:
    """Row 52: another package, platform, Debian package or variable is another environment; a password is not."""
    image = Image()
    same = environment_key(image, PINS, PLATFORM)
    moved = [Pin(**{**vars(pin), "file": pin.file and f"/other/{Path(pin.file).name}"}) for pin in reversed(PINS)]
    assert environment_key(image, moved, PLATFORM) == same
    others = {
        environment_key(image, PINS[:-1], PLATFORM),
        environment_key(image, PINS, "aarch64-manylinux_2_34"),
        environment_key(Image(apt=["git"]), PINS, PLATFORM),
        environment_key(Image(shell_vars={"A": "1"}), PINS, PLATFORM),
        environment_key(image, [*PINS[:-1], Pin("tool", "tool @ git+https://example.org/tool.git@other")], PLATFORM),
    }
    assert len(others | {same}) == 6
    assert environment_key(Image(env={"A": "1"}, includes=["x"]), PINS, PLATFORM) == same


def test_a_lock_file_becomes_pins() -> None:
    text = """
    lock-version = "1.0"
    [[packages]]
    name = "a"
    version = "1"
    marker = "python_version < '4'"
    sdist = { url = "https://x/a.tar.gz", hashes = { sha256 = "22" } }
    wheels = [{ url = "https://x/a.whl", hashes = { sha256 = "11" } }]
    [[packages]]
    name = "b"
    version = "2+cpu"
    wheels = [{ url = "file:///srv/w%20x/b-2%2Bcpu.whl", hashes = { sha256 = "33" } }]
    [[packages]]
    name = "c"
    version = "3"
    archive = { path = "/here/c.whl", hashes = { sha256 = "44" } }
    [[packages]]
    name = "d"
    archive = { url = "https://me:pw@x/d.zip", subdirectory = "sub", hashes = { sha256 = "55" } }
    [[packages]]
    name = "e"
    vcs = { type = "git", url = "https://x/e.git", commit-id = "c0ffee" }
    """
    assert read_pylock(text) == (
        Pin("a", "a==1", ("11", "22"), "python_version < '4'", url="https://x/a.whl"),
        Pin("b", "b==2+cpu", ("33",), file="/srv/w x/b-2+cpu.whl"),
        Pin("c", "c==3", ("44",), file="/here/c.whl", own=True),
        Pin("d", "d @ https://me:pw@x/d.zip#subdirectory=sub", ("55",), url="https://x/d.zip"),
        Pin("e", "e @ git+https://x/e.git@c0ffee"),
    )
    assert strip_login("d @ https://me:pw@x/d.zip@1") == "d @ https://x/d.zip@1"
    with pytest.raises(BootstrapError, match="is on this computer"):
        read_pylock('[[packages]]\nname = "e"\nvcs = { type = "git", url = "file:///e", commit-id = "c" }')


def test_programs_on_a_host_get_no_secret_of_its_own_sessions(played: Played) -> None:
    """SEC-13: what the image gives them they get, and what the host has set for indexes."""
    image = Image(shell_vars={"MY_TOKEN": "of the image"})
    own = {"HF_TOKEN": "x", "aws_secret": "a\nHOME=/x", "MYSQL_PWD": "x", "GH_PAT": "x", "SSH_KEY": "x"}
    kept = {"UV_INDEX_A_PASSWORD": "pw", "KEYBOARD": "us", "https_proxy": "http://proxy"}
    code, said = played.run(image, settings_text(image, {}), **own, **kept)
    assert code == 0, said
    entries = (played.orders / "install.env").read_bytes().decode().split("\0")
    seen = dict(entry.partition("=")[::2] for entry in entries)
    assert not seen.keys() & own.keys()
    assert seen["MY_TOKEN"] == "of the image"
    assert {name: seen[name] for name in kept} == kept
    assert seen["HOME"] == str(played.root / "home")


def run_settings(text: str, name: str, shell: str = "sh", **env: str) -> str:
    order = [shell, "-c", f'{text}\nprintf %s "${{{name}-unset}}"']
    return subprocess.run(order, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout


def test_a_host_has_the_users_settings_unless_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-13: of the client's environment only the settings of indexes, and none that lead to its own disk."""
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    user = {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_INDEX": "file:///srv/i https://b/simple more=https://c/simple",
        "UV_FIND_LINKS": "/srv/wheels,https://d/links,https://e/links",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_MORE_PASSWORD": "pw",
        "HTTPS_PROXY": "http://proxy",
        "SSL_CERT_FILE": "/etc/x",
        "AWS_SECRET_ACCESS_KEY": "canary",
    }
    text = settings_text(Image(shell_vars={"UV_HTTP_TIMEOUT": "7"}), user)
    assert run_settings(text, "UV_DEFAULT_INDEX") == "https://a/simple"
    assert run_settings(text, "PIP_INDEX_URL") == "https://a/simple"
    assert run_settings(text, "UV_INDEX") == "https://b/simple more=https://c/simple"
    assert run_settings(text, "UV_FIND_LINKS") == "https://d/links,https://e/links"
    assert run_settings(text, "UV_INDEX_MORE_PASSWORD") == "pw"
    assert run_settings(text, "UV_DEFAULT_INDEX", UV_DEFAULT_INDEX="https://own") == "https://own"
    assert run_settings(text, "UV_DEFAULT_INDEX", UV_INDEX_URL="https://own") == "unset"
    assert run_settings(text, "UV_HTTP_TIMEOUT", UV_HTTP_TIMEOUT="9") == "7"
    assert not re.search("proxy|/etc/x|canary|/srv", text)
    assert settings_text(Image(), {"UV_INDEX": "file:///srv/i"}).count("UV_INDEX=") == 0


# ------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_reads_it(shell: str, tmp_path: Path) -> None:
    for name, text in {
        "setup": script(Image(apt=["git"])),
        "look": look_script("1.2.3"),
        "stop": stop_script("/x")[2],
    }.items():
        file = tmp_path / name
        file.write_text(text)
        order = [shell, *(["sh"] if shell == "busybox" else []), "-n", str(file)]
        assert subprocess.run(order, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_steps_are_said_with_the_time_they_took(played: Played, shell: str) -> None:
    played.shell = {"busybox": "busybox sh", "bash": "bash --posix"}.get(shell, shell)
    code, said = played.run()
    assert code == 0
    begun = [line.partition(" ")[2] for line in said if line.startswith("begin ")]
    ended = [line.split(" ", 2)[2] for line in said if re.match(r"end \d+ ", line)]
    assert begun == ended == [
        "checking the host", "looking for uv", f"looking for Python 3.{sys.version_info[1]}",
        "making the environment", "installing packages",
    ]  # fmt: skip
    env, directory, cache = said[-1].removeprefix("ready ").split("\t")
    assert env == f"{played.cache}/envs/{KEY}"
    assert cache == str(played.cache)
    assert Path(directory).parent == played.cache / "pools"
    assert (Path(env) / ".complete").read_text() == f"{KEY}\n"
    assert (Path(env) / "packages.txt").read_text() == "packages.txt\n"


def test_the_second_time_nothing_is_made(played: Played) -> None:
    assert played.run()[0] == 0
    shutil.rmtree(played.orders)
    code, said = played.run()
    assert code == 0
    assert [line.split(" ")[0] for line in said] == ["begin", "end", "ready"]
    assert not list(played.orders.iterdir())
    assert played.look(f"{played.platform}={KEY}", "other=x")[-1].startswith(f"ready {played.cache}/envs/{KEY}\t")
    assert len(list((played.cache / "pools").iterdir())) == 3


def test_all_that_it_makes_is_the_users_alone(played: Played) -> None:
    """SEC-21, SEC-22: with the laxest umask, as all of these are run."""
    assert played.run()[0] == 0
    played_too = {played.orders, played.cache / "stage"}
    made = [
        path for path in played.cache.rglob("*") if not path.is_symlink() and played_too.isdisjoint([path, path.parent])
    ]
    assert len(made) > 8
    assert not [path for path in made if path.stat().st_mode & 0o077]


# Any text without NUL; also bytes that are no UTF-8, and what shells give a meaning to.
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.sampled_from(
    [
        *("$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"$(touch pwned)"', "\\'; touch pwned #", "0\nx"),
        *(
            "a\nb",
            "\n",
            " ",
            "*",
            "~",
            "!!",
            "${HOME}",
            "-n",
            "\x81\x82\x88",
            "ü€😀",
            "x" * 65536,
            "\\",
            "\\n",
            "a\\\nb",
        ),
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=HOSTILE, login=HOSTILE, shell=st.sampled_from(["sh", "bash --posix"]))
def test_no_value_is_ever_read_as_a_command(
    tmp_path_factory: pytest.TempPathFactory, value: str, login: str, shell: str
) -> None:
    """SEC-16: what is set for the installing programs arrives byte by byte, through the real script, and is not run."""
    root = tmp_path_factory.mktemp("h")
    (root / "home").mkdir()
    played = Played(root, shell)
    image = Image(shell_vars={"VALUE": value, "stage": value, "IFS": value, "key": "x", "log": "/x", "PS4": value})
    code, said = played.run(image, settings_text(image, {"UV_INDEX_A_PASSWORD": login}))
    assert code == 0, said
    seen = dict(entry.partition(b"=")[::2] for entry in (played.orders / "install.env").read_bytes().split(b"\0"))
    assert seen[b"VALUE"] == seen[b"stage"] == value.encode("utf-8", "surrogateescape")
    assert seen[b"UV_INDEX_A_PASSWORD"] == login.encode("utf-8", "surrogateescape")
    assert not list(root.rglob("pwned"))
    assert not Path("pwned").exists()
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "home", ["a b", "$(touch pwned)", "`touch pwned`", "it's", 'a"b', "a;touch pwned", "*[x]?", "ü", "-n", "a\\b"]
)
def test_a_home_may_have_any_name(tmp_path: Path, home: str) -> None:
    """SEC-16: paths of the host are data, too."""
    (tmp_path / home / "home").mkdir(parents=True)
    played = Played(tmp_path / home)
    code, said = played.run(Image(apt=[]))
    assert code == 0, said
    assert said[-1].startswith(f"ready {played.cache}/envs/{KEY}\t{played.cache}/pools/p-")
    assert played.look(f"{played.platform}={KEY}")[-1].startswith(f"ready {played.cache}/envs/{KEY}\t")
    for pool in (played.cache / "pools").iterdir():
        subprocess.run(stop_script(str(pool)), check=True)
    assert not list((played.cache / "pools").iterdir())
    assert not list(tmp_path.rglob("pwned"))


def problems(said: list[str]) -> dict[str, str]:
    found = [line.split(" ", 2)[1:] for line in said if line.startswith("problem ")]
    return dict(found)


def test_all_that_is_wrong_with_a_host_is_said_at_once(played: Played) -> None:
    """Row 51, SEC-21, row 26: each with a code of its own, before anything is put there."""
    played.program("uname", 'case $1 in -sm) echo "Plan9 mips" ;; *) exec /bin/uname "$@" ;; esac')
    played.cache.mkdir(parents=True)
    played.cache.chmod(0o777)
    said = problems(
        played.look(tools="tar no-such-tool", apt="no-such-package-x", PATH=f"{played.root}/programs:/usr/bin:/bin")
    )
    expected = {"system", "tool", "owner"} | ({"apt"} if not shutil.which("dpkg-query") else set())
    assert expected <= set(said)
    assert "Plan9 mips" in said["system"]
    assert "no-such-tool" in said["tool"]
    assert "SKYWARD_CACHE" in said["owner"]
    free = shutil.disk_usage(played.root).free // 1024
    assert re.search(r"\d+ MB free; \d+ MB are needed", problems(played.look(need=free * 2))["disk"])
    assert list(played.cache.iterdir()) == []
    code, lines = played.run(need=free * 2)
    assert code == 20
    assert list(problems(lines)) == ["system", "disk"]


def test_what_was_lacking_is_named_in_the_exit_status(played: Played) -> None:
    played.program("df", "echo 'a b c d e'; echo '/dev/x 100 100 0 100% /'")
    code, said = played.run(Image(pip=["x @ git+https://example.org/x"]), PATH=f"{played.root}/programs:{bare(played)}")
    assert set(problems(said)) == {"tool", "disk"}
    assert code == 27


_FEW = """
    sh env chmod cp df dirname find getconf grep id ln mkdir mktemp mv readlink rm sed sleep tail tar touch uname
"""


def bare(played: Played) -> str:
    """A PATH with the few programs that every host has."""
    directory = played.root / "bare"
    if not directory.exists():
        directory.mkdir()
        for name in _FEW.split():
            found = shutil.which(name)
            assert found
            (directory / name).symlink_to(found)
    return str(directory)


def test_few_programs_are_enough(played: Played) -> None:
    """Row 51: no flock, no curl, no sudo, no python3, no git."""
    code, said = played.run(PATH=bare(played))
    assert code == 0, said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_home_that_cannot_be_written_to(played: Played) -> None:
    """Row 51: as a user to whom nothing belongs there."""
    for directory in (played.root, *played.root.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o005)
    said = problems(played.look(user=65534))
    assert list(said) == ["home"]
    assert "Permission denied" in said["home"]
    other = played.root / "others"
    other.mkdir()
    other.chmod(0o777)
    assert "yours alone" in problems(played.look(user=65534, SKYWARD_CACHE=str(other)))["owner"]
    own = played.root / "own"
    own.mkdir(mode=0o700)
    os.chown(own, 65534, 65534)
    assert played.look(user=65534, SKYWARD_CACHE=str(own))[-1].startswith(f"stage {own}/stage/")
    volume = played.root / "volume"  # as Kubernetes makes it: of root, and open to all users of a pod
    volume.mkdir()
    volume.chmod(0o2777)
    cache = f"{volume}/.cache/skyward"
    assert "yours alone" in problems(played.look(user=65534, SKYWARD_CACHE=cache))["owner"]
    said = played.look(user=65534, SKYWARD_CACHE=cache, SKYWARD_OWN=f"{volume} /dev/shm")
    assert said[-1].startswith(f"stage {cache}/stage/")


@contextmanager
def mounted(directory: Path, options: str) -> Generator[None]:
    directory.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [("size=1m,mode=700,noexec", "noexec", "noexec"), ("size=1m,mode=700,ro", "home", "Read-only file system")],
)
def test_file_systems_on_which_nothing_can_be_made(played: Played, options: str, code: str, words: str) -> None:
    """Row 51."""
    with mounted(played.cache, options):
        said = problems(played.look())
    assert list(said) == [code]
    assert words in said[code]


def test_too_few_open_files_are_refused(played: Played) -> None:
    """Row 27: also where the environment is there already."""
    assert played.run()[0] == 0
    text = f"ulimit -n 256; {look_script('0.13.99')}"
    done = subprocess.run(
        ["sh", "-c", text, "sky", "T", "p", "1", "", "tar", f"{played.platform}={KEY}"],
        env=played.env(), capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert "@T problem files this user may have no more than 256 open files" in done.stdout
    assert "ready" not in done.stdout


@pytest.mark.parametrize(
    ("machine", "libc", "name"),
    [
        ("x86_64", "glibc 2.39", "x86_64-manylinux_2_34"),
        ("x86_64", "glibc 2.34", "x86_64-manylinux_2_34"),
        ("x86_64", "glibc 2.31", "x86_64-manylinux_2_28"),
        ("aarch64", "glibc 2.28", "aarch64-manylinux_2_28"),
        ("arm64", "glibc 2.27", "aarch64-manylinux_2_17"),
        ("x86_64", "", "x86_64-manylinux_2_17"),
        ("riscv64", "glibc 2.39", ""),
    ],
)
def test_a_platform_has_the_name_that_uv_knows(played: Played, machine: str, libc: str, name: str) -> None:
    if not libc and list(Path("/lib").glob("ld-musl-*")):
        pytest.skip("a system with musl")
    played.program("uname", f'case $1 in -sm) echo "Linux {machine}" ;; *) exec /bin/uname "$@" ;; esac')
    played.program("getconf", f'test -n "{libc}" && echo "{libc}"')
    assert f"platform {name}" in played.look()


def test_a_look_says_what_is_there(played: Played) -> None:
    said = played.look()
    assert f"cache {played.cache}" in said
    assert not [line for line in said if line.startswith("uv ")]
    assert said[-1].startswith(f"stage {played.cache}/stage/")
    shutil.rmtree(played.stages()[0])
    assert played.run()[0] == 0
    (played.cache / "wheels" / "cafe").mkdir()
    said = played.look(f"{played.platform}=another")
    assert {f"uv {played.cache}/bin/uv-0.13.99", f"complete {KEY}", "wheel cafe"} <= set(said)
    (played.cache / "envs" / KEY / "bin" / "python").unlink()
    assert f"complete {KEY}" not in played.look(f"{played.platform}={KEY}")


def test_what_was_sent_is_kept_under_its_hash(played: Played) -> None:
    stage = played.stage(script(Image(), "0.13.99"))
    (stage / "cafe,thing-1.0-py3-none-any.whl").write_text("content")
    order = ["sh", str(stage / "setup.sh"), str(stage), "T", "p", KEY, "1"]
    subprocess.run(order, env=played.env(), stdin=subprocess.DEVNULL, check=True, capture_output=True)
    assert (played.cache / "wheels" / "cafe" / "thing-1.0-py3-none-any.whl").read_text() == "content"
    assert not stage.exists()


# ----------------------------------------------------------------------------------------------- when it goes wrong


def test_a_failed_step_shows_its_last_lines_and_leaves_nothing(played: Played) -> None:
    """Row 49."""
    played.orders.mkdir(parents=True)
    (played.orders / "install").write_text("seq 1 100; echo 'no such package' >&2; exit 1\n")
    code, said = played.run()
    assert code == 33
    assert list(problems(said)) == ["packages"]
    shown = [line.removeprefix("| ") for line in said if line.startswith("| ")]
    assert shown == [*map(str, range(82, 101)), "no such package"]
    log = next(line.removeprefix("log ") for line in said if line.startswith("log "))
    assert Path(log).read_text().splitlines()[-1] == "no such package"
    assert list((played.cache / "envs").iterdir()) == []
    assert list((played.cache / "pools").iterdir()) == []


@pytest.mark.parametrize(
    ("order", "words", "code"),
    [
        ("install", "error: Request failed after 3 retries in 8.3s", "network"),
        ("install", "error: No space left on device (os error 28)", "disk"),
        ("install", "Hash mismatch for `cowsay==6.1`", "packages"),
        ("python", "error: anything", "python"),
    ],
)
def test_why_it_failed_is_told_apart(played: Played, order: str, words: str, code: str) -> None:
    """Rows 10, 26, 50."""
    played.orders.mkdir(parents=True)
    (played.orders / order).write_text(f"echo '{words}' >&2; exit 1\n")
    if order == "python":
        (played.orders / "find").write_text("exit 2\n")
    assert list(problems(played.run()[1])) == [code]


def test_a_python_that_does_not_work_is_not_taken(played: Played) -> None:
    """Row 10: one that lacks modules is as good as none."""
    played.program("broken", "case $* in *import*) exit 1 ;; esac; exit 0")
    code, said = played.run(PLAYED_PYTHON=f"{played.root}/programs/broken")
    assert code == 31
    assert "minor version" in problems(said)["python"]
    assert (played.orders / "python.seen").exists()


STEPS = ["find", "venv", "install"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["gone", "killed"])
def test_it_can_be_run_again_after_it_was_cut_off(played: Played, step: str, how: str) -> None:
    """Rows 31, 52: the client goes away, or everything is killed: nothing runs on, nothing half-made is used."""
    played.orders.mkdir(parents=True)
    (played.orders / step).write_text('for w; do :; done; mkdir -p "$w"; : >"$here/waits"; sleep 600 & wait\n')
    process = played.start()
    until((played.orders / "waits").exists)
    assert process.stdin is not None
    if how == "gone":
        process.stdin.close()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    until(lambda: not processes_of(process.pid))
    close(process)
    assert not (played.cache / "envs" / KEY).exists()
    if how == "gone":
        assert process.returncode == 143
        assert not played.stages()
        assert list((played.cache / "envs").iterdir()) == []
    (played.orders / step).unlink()
    for left in played.stages():
        shutil.rmtree(left)
    code, said = played.run()
    assert code == 0, said
    assert [path.name for path in (played.cache / "envs").iterdir()] == [KEY]


def test_programs_that_ignore_the_first_signal_are_killed(played: Played) -> None:
    played.orders.mkdir(parents=True)
    (played.orders / "install").write_text("trap '' TERM; : >\"$here/waits\"; sleep 600 & while :; do wait; done\n")
    process = played.start()
    until((played.orders / "waits").exists)
    close(process)
    process.wait(60)
    until(lambda: not processes_of(process.pid))


def test_settings_that_were_cut_off_are_not_used(played: Played) -> None:
    stage = played.stage(script(Image(), "0.13.99"))
    order = ["sh", str(stage / "setup.sh"), str(stage), "T", "p", KEY, "1", "hold"]
    done = subprocess.run(order, env=played.env(), input=b"2\nexport A='half", capture_output=True, timeout=180)
    assert (done.returncode, done.stdout) == (129, b"")
    assert not stage.exists()


def test_what_lies_beside_it_in_the_group_is_left_alone_at_the_end(played: Played) -> None:
    """The watcher is gone before the last line is said, whenever the pipe is closed after that."""
    process = played.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"@T ready"):
            break
    close(process)
    assert process.wait(60) == 0
    assert len(list((played.cache / "pools").iterdir())) == 1


def test_two_at_once_make_it_once(played: Played) -> None:
    played.orders.mkdir(parents=True)
    (played.orders / "install").write_text('until [ -f "$here/go" ]; do sleep 0.05; done\n')
    first = played.start()
    until((played.orders / "install.seen").exists)
    second = played.start()
    assert second.stdout is not None
    said = b""
    while b"waiting for another process" not in said:
        said = second.stdout.readline()
        assert said
    (played.orders / "go").touch()
    assert [first.wait(60), second.wait(60)] == [0, 0]
    close(first)
    close(second)
    assert len((played.orders / "install.seen").read_text().splitlines()) == 1
    assert [path.name for path in (played.cache / "envs").iterdir()] == [KEY]


def test_a_lock_of_one_that_is_gone_does_not_hold(played: Played) -> None:
    """Also where its number belongs to another process by now, ours."""
    envs = played.cache / "envs"
    envs.mkdir(parents=True)
    (envs / f"{KEY}.lock").symlink_to(f"{os.uname().nodename}-{os.getpid()}")
    (envs / f"{KEY}.tmp-{os.uname().nodename}-{os.getpid()}").mkdir()
    (envs / f"{KEY}.tmp-elsewhere-1").mkdir()
    assert played.run()[0] == 0
    assert {path.name for path in envs.iterdir()} == {KEY, f"{KEY}.tmp-elsewhere-1"}


def test_a_lock_of_another_host_holds_as_long_as_it_is_touched(played: Played) -> None:
    """Hosts that share a home directory, as in clusters: numbers of their processes say nothing here."""
    envs = played.cache / "envs"
    envs.mkdir(parents=True)
    lock, held = envs / f"{KEY}.lock", envs / f"{KEY}.lock-held"
    lock.symlink_to("elsewhere-1")
    past = time.time() - 600
    os.utime(lock, (past, past), follow_symlinks=False)
    held.touch()
    process = played.start()
    assert process.stdout is not None
    assert any(b"waiting for another process" in line for line in process.stdout)
    assert process.poll() is None
    os.utime(held, (past, past))
    assert process.wait(60) == 0
    close(process)
    assert [path.name for path in envs.iterdir()] == [KEY]


def test_what_nobody_used_for_long_is_removed_unless_a_pool_is_there(played: Played) -> None:
    old = played.cache / "envs" / "old"
    old.mkdir(parents=True)
    (old / ".complete").touch()
    month = time.time() - 40 * 86400
    os.utime(old / ".complete", (month, month))
    pool = played.cache / "pools" / "other-XXXXXX"
    pool.mkdir(parents=True)
    assert played.run()[0] == 0
    assert old.exists()
    for path in (played.cache / "pools").iterdir():
        path.rmdir()
    shutil.rmtree(played.cache / "envs" / KEY)
    assert played.run()[0] == 0
    assert not old.exists()


# ---------------------------------------------------------------------------------------------------- apt and uv


DPKG = "case $* in *have*) echo 'installed 1.0' ;; *) exit 1 ;; esac"


def test_missing_debian_packages_are_installed_with_sudo(played: Played) -> None:
    for name in ("apt-get", "dpkg"):
        played.program(name, f'echo "{name} $* $DEBIAN_FRONTEND" >>"{played.root}/apt.seen"')
    played.program("dpkg-query", DPKG)
    played.program("id", "echo 1000")
    played.program("sudo", 'test "$1" = -n && shift && exec "$@"')
    code, said = played.run(Image(apt=["have", "have=1.0", "have=2.0", "lack"]))
    assert code == 0, said
    assert "begin installing apt packages" in said
    assert (played.root / "apt.seen").read_text().splitlines() == [
        "dpkg --configure -a noninteractive",
        "apt-get -o DPkg::Lock::Timeout=0 -o Acquire::Retries=3 update noninteractive",
        "apt-get -o DPkg::Lock::Timeout=0 -o Acquire::Retries=3 install --yes --no-install-recommends"
        " have=2.0 lack noninteractive",
    ]


def test_a_user_without_sudo_is_told_the_command(played: Played) -> None:
    """Row 51."""
    played.program("apt-get", "exit 1")
    played.program("dpkg-query", DPKG)
    played.program("id", "echo 1000")
    played.program("sudo", "echo 'a password is required' >&2; exit 1")
    said = problems(played.look(apt="have lack"))
    assert said["sudo"].endswith("Run there: sudo apt-get install --yes lack")
    assert not problems(played.look(apt="have"))


RPM = "case $* in *have) echo have-1.0 ;; *) echo 'no package' && exit 1 ;; esac"


def without_apt(played: Played, dnf: str) -> str:
    """A PATH as on Amazon Linux: dnf and rpm, no apt."""
    played.program("dnf", f'echo "$*" >>"{played.root}/dnf.seen"\n{dnf}')
    played.program("rpm", RPM)
    for name in ("true", "wc", "tr"):
        (played.root / "programs" / name).symlink_to(shutil.which(name) or "")
    played.program("id", "echo 1000")
    played.program("sudo", 'test "$1" = -n && shift && exec "$@"')
    return f"{played.root}/programs:{bare(played)}"


def test_where_there_is_dnf_and_no_apt_it_installs_what_is_missing(played: Played) -> None:
    path = without_apt(played, "true")
    code, said = played.run(Image(apt=["have", "lack", "git"]), PATH=path)
    assert code == 0, said
    assert "begin installing packages with dnf" in said
    ordered = "--assumeyes --setopt=install_weak_deps=False install lack git"
    assert (played.root / "dnf.seen").read_text().splitlines() == [ordered]
    shutil.rmtree(played.cache / "envs")
    assert played.run(Image(apt=["have"]), PATH=path)[0] == 0
    assert (played.root / "dnf.seen").read_text().splitlines() == [ordered]


@pytest.mark.parametrize(
    ("dnf", "kind", "words"),
    [
        ("echo 'No match for argument: libx-dev'; exit 1", "apt", "no package libx-dev. "),
        ("echo 'Error: Transaction failed'; exit 1", "apt", "dnf could not install lack libx-dev."),
        ("echo 'Curl error (6): Could not resolve hostname'; exit 1", "network", "could not be reached"),
    ],
)
def test_what_dnf_cannot_install_is_named(played: Played, dnf: str, kind: str, words: str) -> None:
    code, said = played.run(Image(apt=["lack", "libx-dev"]), PATH=without_apt(played, dnf))
    assert code != 0
    assert words in problems(said)[kind]


def test_a_host_with_dnf_says_what_it_cannot_do_before_anything_is_sent(played: Played) -> None:
    path = without_apt(played, "true")
    assert not problems(played.look(apt="have lack", PATH=path))
    assert "names a version of Debian's" in problems(played.look(apt="have=1.0", PATH=path))["apt"]
    played.program("sudo", "exit 1")
    assert problems(played.look(apt="lack", PATH=path))["sudo"].endswith("Run there: sudo dnf install --assumeyes lack")
    (played.root / "programs" / "dnf").unlink()
    assert "neither apt nor dnf here to install lack" in problems(played.look(apt="lack", PATH=path))["apt"]


@pytest.mark.parametrize(
    ("version", "fits"), [("0.12.0", True), ("0.14.1", True), ("1.0.0", True), ("0.11.9", False), ("x", False)]
)
def test_a_uv_on_the_path_serves_if_it_is_new_enough(played: Played, version: str, fits: bool) -> None:
    played.program("uv", f"echo 'uv {version} (of today)'")
    assert ("uv uv" in played.look()) == fits


def test_a_host_without_uv_gets_it_from_the_index_by_its_hash(played: Played) -> None:
    """SEC-26: by pip, into a place of its own; one that was altered is refused."""
    wheel = played.root / "uv-0.13.99-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        member = zipfile.ZipInfo("uv-0.13.99.data/scripts/uv")
        member.external_attr = 0o100755 << 16
        archive.writestr(member, UV)
        archive.writestr("uv-0.13.99.dist-info/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 0.13.99\n")
        archive.writestr("uv-0.13.99.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("uv-0.13.99.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (played.root / "programs").mkdir()
    (played.root / "programs" / "python3").symlink_to(sys.executable)

    def run(digest: str) -> subprocess.CompletedProcess[str]:
        stage = played.stage(script(Image(), "0.13.99"))
        (stage / "uv").unlink()
        (stage / "requirements.txt").write_text(f"x==1\nuv @ {wheel.as_uri()} --hash=sha256:{digest}\nuvloop==1\n")
        order = ["sh", str(stage / "setup.sh"), str(stage), "T", "p", KEY, "1"]
        env = played.env(PATH=f"{played.root}/programs:{bare(played)}")
        return subprocess.run(order, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    altered = run("0" * 64)
    assert altered.returncode == 30
    assert "DO NOT MATCH THE HASHES" in altered.stdout
    made = run(digest)
    assert made.returncode == 0, made.stdout
    assert (played.cache / "bin" / "uv-0.13.99").read_text() == UV


# ----------------------------------------------------------------------------------------------------- the end of it


KEEPER = """
import signal, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("manner", ["obedient", "deaf"])
def test_stopping_ends_the_keeper_and_removes_the_directory(tmp_path: Path, manner: str) -> None:
    directory = tmp_path / "pools" / "p-XXXXXX"
    directory.mkdir(parents=True)
    (directory / "file").touch()
    with subprocess.Popen([sys.executable, "-c", KEEPER, directory, manner], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        (directory / "keeper.pid").write_text(f"{keeper.pid}\n")
        subprocess.run(stop_script(str(directory)), check=True, timeout=180)
        assert keeper.wait(60) == (-signal.SIGKILL if manner == "deaf" else -signal.SIGTERM)
    assert not directory.exists()
    subprocess.run(stop_script(str(directory)), check=True)


def test_stopping_touches_no_process_that_is_not_the_pools(tmp_path: Path) -> None:
    directory = tmp_path / "pools" / "p-XXXXXX"
    directory.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", KEEPER, f"{directory}2", "x"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (directory / "keeper.pid").write_text(str(other.pid))
        subprocess.run(stop_script(str(directory)), check=True, timeout=180)
        assert other.poll() is None
        other.kill()
    assert not directory.exists()


def test_stopping_removes_nothing_but_directories_of_pools(tmp_path: Path) -> None:
    """Its `rm` only writes down what it was told, so that a mistake in the script removes nothing here."""
    programs, removed = tmp_path / "bin", tmp_path / "removed"
    programs.mkdir()
    (programs / "rm").write_text(f'#!/bin/sh\necho "$@" >> {removed}\n')
    (programs / "rm").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    (tmp_path / "pools" / "p").mkdir(parents=True)
    for wrong in ("", str(tmp_path), f"{tmp_path}/", f"{tmp_path}/pools", f"{tmp_path}/pools/", "pools/x"):
        assert subprocess.run(stop_script(wrong), env=env, timeout=180).returncode == 2
    assert not removed.exists()
    subprocess.run(stop_script(f"{tmp_path}/pools/p"), env=env, timeout=180)
    assert f"-rf {tmp_path}/pools/p" in removed.read_text().splitlines()

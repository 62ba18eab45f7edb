"""Hosts made ready for pools, with the real uv: on this computer as if it were one, and on the test hosts over ssh."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import pytest

from skyward.api.image import Image, PipIndex
from skyward.api.shell import Finished, Shell, SshTarget
from skyward.errors import BootstrapError, InvalidArgument, PythonMismatch
from skyward.setup.env import remote, uv
from skyward.setup.env.local import Environment
from skyward.setup.env.remote import Packages, Patience, prepare_host
from skyward.setup.env.script import look_script
from skyward.setup.env.wheel import build_wheel
from skyward.setup.local_shell import LocalShell
from skyward.setup.ssh.shell import SshShell
from skyward.transport.includes import import_paths, pack, unpack
from tests.support.hosts import Host as Machine
from tests.support.hosts import HostSpec, Network, lacks_python, unavailable
from tests.support.indexes import Index, wheel

SECRET = f"hunter{secrets.token_hex(6)}"  # other test runs on this computer have their own

needs_hosts = pytest.mark.skipif(unavailable() is not None, reason=f"no test hosts: {unavailable()}")
needs_python = pytest.mark.skipif(lacks_python() is not None, reason=str(lacks_python()))


class Counted(LocalShell):
    """This computer as a host that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def run(self, argv: Sequence[str], data: bytes = b"", timeout: float = 60.0) -> Finished:
        self.asked.append("run")
        return super().run(argv, data, timeout)

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        self.asked.append("start")
        return super().start(argv, env, stderr)

    def upload(self, source: bytes | Path, dest: str) -> None:
        self.asked.append(f"upload {Path(dest).name}")
        super().upload(source, dest)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Skyward as it is now: its files may change while these tests run."""
    return build_wheel(tmp_path_factory.mktemp("snapshot"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> Path:
    """An empty cache, for the client and for the host that it is, too: one that has the client's Python."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).resolve().parent), os.environ["PATH"])))
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "source_hash", lambda: "one state of the source")
    monkeypatch.setattr(remote, "build_wheel", lambda dest: Path(shutil.copy(snapshot, dest)))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes every server unreachable for the programs that are started from then on."""

    def cut() -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
            monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("UV_HTTP_RETRIES", "0")

    return cut


def ready(
    image: Image,
    shell: Shell | None = None,
    packages: Packages | None = None,
    seconds: float = 110,
    **more: object,
) -> tuple[Environment, list[tuple[str, float | None]]]:
    said: list[tuple[str, float | None]] = []
    host = prepare_host(
        shell or LocalShell(),
        image,
        pool="a pool",
        deadline=time.monotonic() + seconds,
        report=lambda step, took: said.append((step, took)),
        packages=packages or Packages(image),
    )
    return host, said


def own_platform() -> str:
    order = ["sh", "-c", look_script("0.0.0"), "sky", "T", "p", "1", "", ""]
    said = subprocess.run(order, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.removeprefix("@T platform ") for line in said if line.startswith("@T platform "))


def run(host: Environment, code: str) -> str:
    done = subprocess.run([host.python, "-I", "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True)
    return done.stdout


def project(directory: Path) -> Path:
    """A package as its author has it: a directory with sources."""
    (directory / "minepkg").mkdir(parents=True)
    (directory / "minepkg" / "__init__.py").write_text("here = 1\n")
    (directory / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "minepkg"\nversion = "1.2"\ndependencies = ["tinything"]\n'
    )
    return directory


def test_a_host_gets_what_the_image_asks_for_once(
    cache: Path, tmp_path: Path, no_network: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 10, 52, SEC-27: packages of an index, a directory and a file of the client's, its versions; then kept."""
    tiny = wheel(tmp_path / "wheels", "tinything", "1.0")
    image = Image(
        pip=["cowsay", str(project(tmp_path / "mine")), f"tinything @ {tiny.as_uri()}"], env={"TOKEN": "canary-of-env"}
    )
    shell = Counted()
    host, said = ready(image, shell)
    assert shell.asked == ["run", "upload uv", "upload bundle.tar", "start"]
    assert [step for step, took in said if took is None] == [step for step, took in said if took is not None]
    assert {"resolving packages", "sending packages", "installing packages"} <= {step for step, _ in said}
    names = ("cloudpickle", "minepkg", "tinything")
    code = f"import cowsay, minepkg, skyward, importlib.metadata as m; print([m.version(n) for n in {names!r}])"
    assert run(host, code) == f"{[metadata.version('cloudpickle'), '1.2', '1.0']}\n"
    assert run(host, "import skyward; print(skyward.__file__)").startswith(f"{cache}/envs/")
    environment = Path(host.env["VIRTUAL_ENV"])
    assert list(environment.rglob("cowsay/__pycache__/*.pyc"))
    record = (environment / "packages.txt").read_text()
    assert "cowsay==" in record
    assert "--hash=sha256:" in record
    assert host.directory.startswith(f"{cache}/pools/a-pool-")
    assert host.env["PATH"].startswith(f"{environment}/bin:/")
    assert subprocess.run(["grep", "-r", "canary-of-env", cache]).returncode == 1

    # Again: one round trip, whatever the network does.
    no_network()
    shell = Counted()
    again, said = ready(image, shell)
    assert shell.asked == ["run"]
    assert said == []
    assert again.python == host.python
    assert again.directory != host.directory

    # Without the environment, all that it is made of is still there.
    shutil.rmtree(environment)
    shell = Counted()
    assert ready(image, shell)[0].python == host.python
    assert shell.asked == ["run", "upload bundle.tar", "start"]


def test_an_environment_that_another_client_made_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named by what is in it."""
    host, _ = ready(Image())
    shutil.rmtree(cache / "resolved")
    monkeypatch.setattr(remote, "source_hash", lambda: "another name for the same")
    shell = Counted()
    again, said = ready(Image(), shell)
    assert again.python == host.python
    assert shell.asked == ["run", "upload bundle.tar", "start"]
    assert "installing packages" not in dict(said)


def test_a_conflict_is_found_once_for_all_hosts_before_any_installs(cache: Path) -> None:
    """Row 49."""
    image = Image(pip=["cowsay==6.1", "cowsay<6"])
    packages = Packages(image)
    shells = [Counted(), Counted()]
    errors: list[BootstrapError] = []

    def prepare(shell: Counted) -> None:
        with pytest.raises(BootstrapError, match="unsatisfiable") as caught:
            ready(image, shell, packages)
        errors.append(caught.value)

    threads = [threading.Thread(target=prepare, args=[shell]) for shell in shells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] is errors[1]
    assert errors[0].step == "resolving packages"
    assert [shell.asked for shell in shells] == [["run", "run"]] * 2
    assert list((cache / "stage").iterdir()) == list((cache / "envs").iterdir()) == []


def test_another_python_is_refused_before_a_host_is_asked(cache: Path) -> None:
    """Row 10."""
    shell = Counted()
    with pytest.raises(PythonMismatch, match="cannot cross"):
        ready(Image(python=f"3.{sys.version_info[1] + 1}"), shell)
    assert shell.asked == []
    with pytest.raises(InvalidArgument, match="there is no"):
        ready(Image(pip=["./no-such-directory"]), shell)


def test_a_host_without_a_fitting_python_says_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 10: and what to do about it."""
    few = tmp_path / "few"
    few.mkdir()
    for name in "sh chmod df find getconf grep id ln mkdir mktemp mv readlink rm sed sort tail tar touch uname".split():
        (few / name).symlink_to(shutil.which(name) or name)
    image = Image()
    packages = Packages(image)
    packages.recipe(own_platform(), "/x", time.monotonic() + 300)
    monkeypatch.setenv("PATH", str(few))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    with pytest.raises(PythonMismatch, match=r"that works, and uv .*UV_PYTHON_INSTALL_MIRROR") as caught:
        ready(image, packages=packages)
    assert caught.value.step == f"looking for Python 3.{sys.version_info[1]}"
    assert caught.value.exit_code == 31

    (uv,) = (cache / "bin").iterdir()  # now it finds two others
    listed = "cpython-3.9.2-linux-x86_64-gnu /usr/bin/python3\\ncpython-3.6.8-linux-x86_64-gnu /usr/bin/python3.6\\n"
    uv.write_text(
        f'#!/bin/sh\ncase $* in --version) echo uv 99.0.0 ;; *list*) printf "{listed}" ;; *) exit 1 ;; esac\n'
    )
    with pytest.raises(PythonMismatch, match=r"that works \(it has 3\.6\.8, 3\.9\.2\), and uv could not"):
        ready(image, packages=packages)


def test_the_python_that_a_host_names_for_us_is_used_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own-python"
    own.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\nexec {os.path.realpath(sys.executable)} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("SKYWARD_PYTHON", str(own))
    ready(Image())
    assert len((tmp_path / "asked").read_text().splitlines()) > 1, "it was asked by us, and then by uv"


def test_an_index_that_does_not_answer_is_named_with_the_setting_for_a_mirror(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    image = Image(pip=["torch"], pip_indexes=[PipIndex("http://127.0.0.1:9/whl/cpu", ["torch"])])
    with pytest.raises(
        BootstrapError, match=r"mirror, name it: sky\.Image\(pip_indexes=\[sky\.PipIndex\(URL, \['torch'\]"
    ):
        Packages(image).recipe(own_platform(), "/x", time.monotonic() + 60)


def test_all_problems_of_a_host_come_in_one_error(cache: Path) -> None:
    """Rows 26, 51: the need and what is free, and who should do what."""
    cache.mkdir()
    cache.chmod(0o700)
    shell = Counted()
    try:
        remote._NEED_KB, before = 1 << 50, remote._NEED_KB
        with pytest.raises(BootstrapError, match=r"MB free; \d+ MB are needed") as caught:
            ready(Image(), shell)
    finally:
        remote._NEED_KB = before
    assert caught.value.step == "checking the host"
    assert "this computer" in str(caught.value)
    assert shell.asked == ["run"]


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


@pytest.mark.parametrize(("size", "step"), [("20m", "sending packages"), ("75m", "installing packages")])
def test_a_disk_that_becomes_full_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, size: str, step: str, tmp_path: Path
) -> None:
    """Row 26: and what was half made is gone, so that there is room again."""
    monkeypatch.setattr(remote, "_NEED_KB", 1)
    monkeypatch.setattr(remote, "_TIMES", 0)
    with mounted(cache, f"size={size},mode=700"):
        with pytest.raises(BootstrapError) as caught:
            ready(Image())
        left = [path.name for name in ("stage", "envs", "pools") for path in (cache / name).iterdir()]
    assert caught.value.step == step
    assert "space" in str(caught.value)
    assert left == []


# ------------------------------------------------------------------------------------------------------- indexes


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index", f"me:{SECRET}-pw")
    yield made
    made.close()


@contextmanager
def watched_commands() -> Generator[list[str]]:
    """Every command line that was seen on this computer meanwhile."""
    found: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    found.add(path.read_bytes().decode("utf-8", "replace"))
                except OSError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    lines: list[str] = []
    try:
        yield lines
    finally:
        stop.set()
        thread.join()
        lines += found


def test_passwords_reach_uv_and_nothing_else(cache: Path, tmp_path: Path, index: Index) -> None:
    """SEC-10, SEC-11, SEC-28, row 50: an index that answers badly at first; passwords in no argument and no file."""
    index.add("tinything", "1.0")
    index.add("direct", "2.0")
    image = Image(
        pip=["tinything", f"direct @ {index.url.removesuffix('simple')}files/direct-2.0-py3-none-any.whl"],
        pip_indexes=[PipIndex(index.url, ["tinything"])],
        shell_vars={"MY_TOKEN": f"{SECRET}-token"},
    )
    index.refusals = 2
    with watched_commands() as seen:
        host, said = ready(image)
    assert run(host, "import tinything, direct; print(tinything.version, direct.version)") == "1.0 2.0\n"
    assert any("setup.sh" in line for line in seen)
    assert not [line for line in seen if SECRET in line]
    assert SECRET not in f"{said}"
    assert subprocess.run(["grep", "-r", SECRET, cache]).returncode == 1


def test_an_altered_package_is_refused(cache: Path, index: Index) -> None:
    """SEC-26: between resolving and installing, the index has put another file in its place."""
    index.add("tinything", "1.0")
    image = Image(pip=["tinything"], pip_indexes=[PipIndex(index.url, ["tinything"])])
    packages = Packages(image)
    packages.recipe(own_platform(), "/x", time.monotonic() + 300)
    index.add("tinything", "1.0", "evil = True\n")
    with pytest.raises(BootstrapError, match="Hash mismatch") as caught:
        ready(image)
    assert caught.value.step == "installing packages"
    assert SECRET not in str(caught.value)


def test_an_index_that_is_gone_is_told_from_a_bad_package(cache: Path, index: Index) -> None:
    """Row 50: uv tries again by itself, and only then is it a failure."""
    index.add("tinything", "1.0")
    image = Image(
        pip=["tinything"], pip_indexes=[PipIndex(index.url, ["tinything"])], shell_vars={"UV_HTTP_RETRIES": "1"}
    )
    packages = Packages(image)
    packages.recipe(own_platform(), "/x", time.monotonic() + 300)
    index.refusals = 1000
    with pytest.raises(BootstrapError, match="could not be reached") as caught:
        ready(image, packages=packages)
    assert caught.value.exit_code == 32


def test_what_is_resolved_serves_without_a_network(cache: Path, no_network: Callable[[], None]) -> None:
    image = Image(pip=["cowsay"])
    deadline = time.monotonic() + 300
    first = Packages(image).recipe("aarch64-manylinux_2_28", "/x", deadline)
    no_network()
    kept = Packages(image)
    assert kept.recipe("aarch64-manylinux_2_28", "/x", deadline) == first
    assert kept.known() == {"aarch64-manylinux_2_28": first.key}
    assert (
        "aarch64" in " ".join(file.name for file in first.carried) or "aarch64" not in first.files["requirements.txt"]
    )
    built = next(file.path for file in first.carried if file.name.startswith("skyward-"))
    built.unlink()
    assert kept.known() == {}


def test_a_host_of_another_kind_gets_a_uv_that_runs_there_by_its_hash(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-26"""
    installed: list[str] = []
    run = uv.run

    def watched(step: str, command: list[str], *rest: Any) -> str:
        if "install" in command:
            assert "--require-hashes" in command
            installed.append(Path(command[-1]).read_text())
        return run(step, command, *rest)

    monkeypatch.setattr(uv, "run", watched)
    packages = Packages(Image())
    deadline = time.monotonic() + 300
    found = packages.uv("aarch64-unknown-linux-musl", deadline)
    assert found is not None
    (asked,) = installed
    assert f"uv=={packages.uv_version}" in asked
    assert "--hash=sha256:" in asked
    assert found.read_bytes()[:20].endswith(b"\xb7\x00")  # ELF's number for 64-bit ARM
    assert packages.uv("aarch64-unknown-linux-musl", deadline) == found
    assert packages.uv("no-such-platform", deadline) is None


# ------------------------------------------------------------------------------------------------------ cut off


CLIENT = """
import shutil, sys, time
from pathlib import Path
from skyward.setup.env import remote
from skyward.api.image import Image
from skyward.setup.env.remote import Packages, prepare_host
from skyward.setup.local_shell import LocalShell
remote.source_hash = lambda: "one state of the source"
remote.build_wheel = lambda dest: Path(shutil.copy(sys.argv[1], dest))
image = Image(pip=["cowsay"])
report = lambda step, took: print(step, took, flush=True)
prepare_host(LocalShell(), image, pool="p", deadline=time.monotonic() + 110, report=report, packages=Packages(image))
"""


def wait_until_gone(text: str) -> None:
    """Waits until no process has `text` in its command line."""
    deadline = time.monotonic() + 300
    while subprocess.run(["pgrep", "-f", "--", text], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("step", ["sending packages", "installing packages"])
def test_nothing_runs_on_a_host_when_the_client_was_killed(cache: Path, snapshot: Path, step: str) -> None:
    """Rows 31, 52: kill -9 in the middle; the next one finds no lock, no half of anything, and succeeds."""
    client = subprocess.Popen([sys.executable, "-c", CLIENT, snapshot], stdout=subprocess.PIPE, text=True, cwd="/")
    assert client.stdout is not None
    assert any(line.startswith(step) for line in client.stdout)
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    wait_until_gone(f"{cache}/")
    assert not list((cache / "envs").glob("*"))
    host, _ = ready(Image(pip=["cowsay"]))
    assert run(host, "import cowsay; print(1)") == "1\n"
    assert len(list((cache / "envs").iterdir())) == 1


def test_what_takes_too_long_is_ended_on_the_host(cache: Path) -> None:
    """The step is named, and bootstrap_timeout."""
    image = Image(pip=["cowsay"], bootstrap_timeout=3)
    packages = Packages(image)
    packages.recipe(own_platform(), "/x", time.monotonic() + 300)
    with pytest.raises(BootstrapError, match="bootstrap_timeout=3 s"):
        ready(image, packages=packages, seconds=0.6)
    wait_until_gone(f"{cache}/")


def test_an_installation_that_gets_on_is_given_more_time(cache: Path) -> None:
    """As torch's gigabytes over a slow line: the limit counts from the last progress."""
    image = Image(pip=["cowsay"], bootstrap_timeout=6)
    packages = Packages(image)
    packages.recipe(own_platform(), "/x", time.monotonic() + 300)
    real = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    slow = cache / "bin" / f"uv-{packages.uv_version}"
    slow.parent.mkdir(parents=True, exist_ok=True)
    filling = f"for i in $(seq 40); do head -c 2000000 /dev/zero >> {cache}/filler && sleep 0.2; done"
    slow.write_text(f'#!/bin/sh\n[ "$1" != venv ] || {{ {filling}; }}\nexec {real} "$@"\n')
    slow.chmod(0o700)
    began = time.monotonic()
    host, _ = ready(image, packages=packages, seconds=6)
    assert time.monotonic() - began > 6
    assert run(host, "import cowsay; print(1)") == "1\n"


def test_progress_prolongs_a_limit_but_not_for_ever() -> None:
    patience = Patience(100.0, 60.0)
    patience.extend(30.0)
    assert patience.deadline == 100.0
    patience.extend(90.0)
    assert patience.deadline == 150.0
    for now in range(90, 1000):
        patience.extend(now)
    assert patience.deadline == 400.0


# ----------------------------------------------------------------------------------------------------- includes


def test_includes_arrive_whole_and_are_importable(cache: Path, tmp_path: Path) -> None:
    """Row 53: under their name only when all of them are there."""
    root = tmp_path / "root"
    for name in ("app/__init__.py", "src/mod.py", "src/deep/pkg/__init__.py", "data/x.csv", "only/skip.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    image = Image(includes=["app", "src", "src/deep/pkg", "data", "only"], excludes=["skip.py"])
    directory = tmp_path / "pool"
    directory.mkdir()
    with (tmp_path / "packed").open("wb") as packed:
        pack(image, root, packed)
    LocalShell().upload(tmp_path / "packed", f"{directory}/includes.tar")
    assert [path.name for path in directory.iterdir()] == ["includes.tar"]
    with (directory / "includes.tar").open("rb") as archive:
        unpack(archive, directory / "includes")
    assert (directory / "includes" / "src" / "mod.py").exists()
    assert import_paths(image, root) == (".", "src", "src/deep")


# --------------------------------------------------------------------------------------------------- over ssh


@contextmanager
def reached(network: Network, machine: Machine) -> Generator[SshShell]:
    target = SshTarget(machine.address, "sky", key=str(network.key), known_hosts=str(network.known_hosts), config=False)
    shell = SshShell(target)
    shell.connect(time.monotonic() + 300)
    try:
        yield shell
    finally:
        shell.close()


@needs_hosts
@needs_python
def test_a_host_without_a_network_gets_everything_from_the_client(cache: Path) -> None:
    """As a plain user, without sudo, Python of the host's own; SEC-22: what is there is for that user alone."""
    image = Image(pip=["cowsay"])
    with Network(1) as network, reached(network, network[0]) as shell:
        host, said = ready(image, shell)
        assert any("without a network" in step for step, _ in said)
        assert host.python.startswith("/home/sky/.cache/skyward/envs/")
        code = "import cowsay, skyward.node.keeper; print('works')"
        assert network[0].run([host.python, "-P", "-c", code], user="sky").stdout == "works\n"
        for path in (host.directory, "/home/sky/.cache/skyward", host.python):
            assert network[0].run(["ls", path], user="mallory", check=False).returncode != 0
        again, said = ready(image, shell)
        assert (again.python, said) == (host.python, [])
        shell.run(remote.stop_script(host.directory))
        assert network[0].run(["ls", "/home/sky/.cache/skyward/pools"]).stdout.split() == [Path(again.directory).name]
        assert not [process for process in network[0].processes(user="sky") if "skyward" in " ".join(process.argv)]


@needs_hosts
@pytest.mark.parametrize(
    ("spec", "image", "words"),
    [
        (HostSpec(home_size="50m"), Image(), r"\d+ MB free; \d+ MB are needed"),
        (HostSpec(read_only_home=True), Image(), "Read-only file system"),
        (HostSpec(limits={"nofile": 256}), Image(), "no more than 256 open files"),
        (HostSpec(hide=["/usr/bin/tar", "/bin/tar"]), Image(), "there is no tar"),
        (
            HostSpec(),
            Image(apt=["dpkg", "no-such-package-x"]),
            r"Run there: sudo apt-get install --yes no-such-package-x$",
        ),
    ],
)
def test_a_host_that_cannot_be_used_says_why(cache: Path, spec: HostSpec, image: Image, words: str) -> None:
    """Rows 26, 27, 51: at the first look, with nothing left there."""
    with Network([spec]) as network, reached(network, network[0]) as shell:
        with pytest.raises(BootstrapError, match=words) as caught:
            ready(image, shell)
        assert caught.value.step == "checking the host"
        assert not network[0].run(["find", "/home/sky/.cache", "-name", "stage"], check=False).stdout


@needs_hosts
def test_a_host_without_python_says_so(cache: Path) -> None:
    """Rows 10, 51: and the client's uv cannot get one without a network."""
    with Network([HostSpec(hide=["/usr/bin/python3*"])]) as network, reached(network, network[0]) as shell:
        with pytest.raises(PythonMismatch, match=r"python3\.\d+ on the PATH"):
            ready(Image(), shell)


@needs_hosts
@needs_python
def test_nothing_runs_on_when_the_connection_is_closed(cache: Path) -> None:
    """Row 52: also the watcher has gone, and the next time it works."""
    image = Image(pip=["cowsay"])
    with Network(1) as network:
        errors: list[BaseException] = []
        with reached(network, network[0]) as shell:
            begun = threading.Event()

            def prepare() -> None:
                def report(step: str, took: float | None) -> None:
                    if step == "installing packages":
                        begun.set()

                deadline = time.monotonic() + 300
                try:
                    prepare_host(shell, image, pool="p", deadline=deadline, report=report, packages=Packages(image))
                except BootstrapError as exc:
                    errors.append(exc)

            thread = threading.Thread(target=prepare)
            thread.start()
            assert begun.wait(60)
        thread.join(60)
        assert len(errors) == 1
        deadline = time.monotonic() + 300
        while [process for process in network[0].processes(user="sky") if "skyward" in " ".join(process.argv)]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with reached(network, network[0]) as shell:
            assert ready(image, shell)[0].python


def standalone_python(directory: Path) -> tuple[str, Path]:
    """The system's Python as an archive like those that uv fetches; and its version."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    program = shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin:/bin")
    assert program
    code = "import platform, sysconfig; print(platform.python_version(), sysconfig.get_path('stdlib'))"
    full, library = subprocess.run(
        [program, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    left_out = shutil.ignore_patterns("test", "dist-packages", "site-packages", "__pycache__", "config-*")
    shutil.copytree(library, directory / "python" / "lib" / f"python{version}", ignore=left_out)
    (directory / "python" / "bin").mkdir()
    shutil.copy(program, directory / "python" / "bin" / f"python{version}")
    for name in ("python", "python3"):
        (directory / "python" / "bin" / name).symlink_to(f"python{version}")
    archive = directory / "cpython-install_only_stripped.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(directory / "python", "python")
    return full, archive


@needs_hosts
@needs_python
def test_a_host_without_python_and_without_a_network_gets_one_from_the_client(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(shell_vars={"UV_HTTP_RETRIES": "0"})
    full, archive = standalone_python(tmp_path)
    major, minor, patch = map(int, full.split("."))
    arch = own_platform().partition("-")[0]
    download = {
        "name": "cpython", "arch": {"family": arch, "variant": None}, "os": "linux", "libc": "gnu",
        "major": major, "minor": minor, "patch": patch, "prerelease": "", "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "variant": None, "build": "20260101",
    }  # fmt: skip
    (tmp_path / "downloads.json").write_text(json.dumps({f"cpython-{full}-linux-{arch}-gnu": download}))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(tmp_path / "downloads.json"))
    with Network([HostSpec(hide=["/usr/bin/python3*"])]) as network, reached(network, network[0]) as shell:
        host, said = ready(image, shell)
        steps = [step for step, _ in said]
        assert "fetching Python for a host without a network" in steps
        code = "import os, sys, ssl, skyward.node.keeper; print(os.path.realpath(sys.executable))"
        where = network[0].run([host.python, "-P", "-c", code], user="sky").stdout
        assert where.startswith(f"/home/sky/.cache/skyward/python/cpython-{full}-linux-")
        assert not network[0].run(["ls", "/home/sky/.cache/skyward/stage"]).stdout
        again, said = ready(image, shell)
        assert (again.python, said) == (host.python, [])

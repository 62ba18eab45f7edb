"""Secrets of the user's, and keys of the pool's, on hosts: where they are needed, and nowhere else."""

from __future__ import annotations

import base64
import functools
import http.server
import io
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import zipfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import skyward as sky
from skyward.api.secret import revealed
from skyward.setup.env import script
from tests.ssh.places import CACHE, reached
from tests.support.hosts import Host, Network

TAG = f"canary{secrets.token_hex(6)}"
PASSWORD = f"{TAG}-index"
ENCODED = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
CLIENTS = ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "WANDB_API_KEY", *(f"CANARY_{i}" for i in range(50))]
HOSTILE = f'it\'s "{TAG}-shell" $(touch {CACHE}/pwned-shell) `touch {CACHE}/pwned-shell`; \\ \n -x ü'


@dataclass(repr=False)
class Seen:
    """Everything that was said or could be seen of a pool, from before it was opened on."""

    pool: sky.ComputePool
    said: list[str] = field(default_factory=list[str])
    printed: io.StringIO = field(default_factory=io.StringIO)
    commands: list[str] = field(default_factory=list[str])


WATCH = """
import os, select, sys
seen = set()
while not select.select([0], [], [], 0.005)[0]:
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    seen.add(file.read())
            except OSError:
                pass
sys.stdout.buffer.write(b"\\x01".join(seen))
"""


@contextmanager
def watched(found: list[str]) -> Generator[None]:
    """Collects all command lines of this computer, and so of the hosts on it, as any user of them can read them."""
    watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        found += watcher.communicate(b"\n")[0].replace(b"\0", b" ").decode("utf-8", "replace").split("\x01")


BACKEND = """
import zipfile
def build_wheel(directory, settings=None, metadata=None):
    name = "gitcanary-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr("gitcanary.py", "")
        wheel.writestr("gitcanary-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: gitcanary\\nVersion: 1.0\\n")
        wheel.writestr("gitcanary-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("gitcanary-1.0.dist-info/RECORD", "")
    return name
"""


def repository(path: Path) -> None:
    """A package in a repository that any web server can serve; it needs nothing to be built."""
    work = path.with_suffix(".work")
    work.mkdir(parents=True)
    (work / "backend.py").write_text(BACKEND)
    (work / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "gitcanary"\nversion = "1.0"\n'
    )
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "All of it"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(path)], check=True)
    subprocess.run(["git", "update-server-info"], cwd=path, check=True)


class Index:
    """A package index on the hosts' network, and a repository beside it, which want a password."""

    def __init__(self, root: Path, address: str) -> None:
        wanted = f"Basic {ENCODED}"
        (root / "simple" / "skycanary").mkdir(parents=True)
        file = root / "skycanary-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr("skycanary.py", "")
            wheel.writestr("skycanary-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: skycanary\nVersion: 1.0\n")
            wheel.writestr("skycanary-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("skycanary-1.0.dist-info/RECORD", "")
        (root / "simple" / "skycanary" / "index.html").write_text(f'<a href="/{file.name}">{file.name}</a>')
        repository(root / "canary.git")

        class Answer(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.headers.get("Authorization") == wanted:
                    super().do_GET()
                else:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", "Basic")
                    self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((address, 0), functools.partial(Answer, directory=str(root)))
        self.bare = f"http://{address}:{self.server.server_port}"
        self.url = self.bare.replace("//", f"//me:{PASSWORD}@")
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.05])
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(scope="module")
def index(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    made = Index(tmp_path_factory.mktemp("index"), net.address)
    yield made
    made.close()


@pytest.fixture(scope="module")
def seen(net: Network, index: Index) -> Iterator[Seen]:
    """A pool of two nodes that is given secrets in every way, one that fails, and all that could be seen of both."""
    image = sky.Image(
        pip=["skycanary", f"gitcanary @ git+{index.url}/canary.git"],
        pip_indexes=[sky.PipIndex(f"{index.bare}/simple", ["skycanary"], "me", sky.Secret(PASSWORD))],
        env={"HF_TOKEN": f"{TAG}-env", "TYPED": sky.Secret(f"{TAG}-typed")},
        shell_vars={"BUILD_PASSWORD": HOSTILE, "BUILD_TYPED": sky.Secret(f"{TAG}-build")},
    )
    pool = sky.ComputePool(provider=reached(net, 2), image=image, console="plain")
    found = Seen(pool)
    with pytest.MonkeyPatch.context() as patch, recorded(found):
        for name, value in {**dict.fromkeys(CLIENTS, f"{TAG}-client"), "NO_PROXY": net.address}.items():
            patch.setenv(name, value)
        with closing(pool), ExitStack() as opening:
            opening.enter_context(watched(found.commands))
            pool.__enter__()
            environment() @ pool
            wrong = replace(image, pip=["skycanary==7"])
            with pytest.raises(sky.errors.BootstrapError, match="skycanary==7") as caught:
                sky.ComputePool(provider=reached(net, 1), image=wrong, console="plain").__enter__()
            found.said += [str(caught.value), repr(caught.value), repr(wrong), repr(pool)]
            opening.close()
            yield found


@contextmanager
def recorded(seen: Seen) -> Generator[None]:
    """Keeps all events, prints and log lines, the finest included."""
    handler = logging.Handler()
    handler.emit = lambda record: seen.said.append(logging.Formatter().format(record))
    root, level = logging.getLogger(), logging.getLogger().level
    seen.pool.on_event(lambda event: seen.said.append(repr(event)))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with redirect_stdout(seen.printed), redirect_stderr(seen.printed):
            yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


@sky.compute
def environment() -> dict[str, str]:
    return dict(os.environ)


def grep(host: Host, *texts: str) -> list[str]:
    """Files of a host that hold one of these, and processes that were started with one."""
    places = f"/home /root /tmp /var/tmp /dev/shm /run/lock /run/user {CACHE}"
    script = f'grep -rlaF --devices=skip "$@" {places}; grep -laF "$@" /proc/[0-9]*/environ; true'
    words = [word for text in texts for word in ("-e", text)]
    return host.run(["sh", "-c", f"exec 2>/dev/null; {script}", "sh", *words], user="root", timeout=500).stdout.split()


def shown(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if any(secret in text for secret in (TAG, ENCODED, "PRIVATE KEY"))]


# ------------------------------------------------------------------------------------------------- the user's secrets


def test_secrets_reach_the_functions_they_are_for(seen: Seen) -> None:
    """SEC-9, SEC-13: the image's variables, and nothing that only the client has."""
    for found in environment() @ seen.pool:
        assert {name: value for name, value in found.items() if TAG in value} == revealed(seen.pool.image.env)


def test_no_secret_is_in_a_file_or_an_environment_that_others_see(net: Network, seen: Seen) -> None:
    """SEC-10, SEC-11, SEC-12: while the pool is open; what installed packages have brought is searched, too."""
    environment() @ seen.pool
    net[0].put("/tmp/control", f"{TAG}-control".encode(), mode="600")
    assert grep(net[0], TAG, ENCODED) == ["/tmp/control"]
    net[0].run(["rm", "/tmp/control"], user="root")
    assert grep(net[1], TAG, ENCODED) == []


def test_no_variable_of_an_image_is_a_command(cache: Path, seen: Seen) -> None:
    """SEC-16: of those for the installing programs; see test_security_files for the others."""
    environment() @ seen.pool
    assert not (cache / "pwned-shell").exists()


def test_the_script_for_hosts_holds_no_secret(seen: Seen) -> None:
    """SEC-11."""
    assert TAG not in script.script(seen.pool.image)


def test_the_topology_is_all_that_a_function_is_told(seen: Seen) -> None:
    """SEC-14: no key, no token, no address that is not needed."""
    for found in environment() @ seen.pool:
        told = json.loads(found["COMPUTE_POOL"])
        assert TAG not in found["COMPUTE_POOL"]
        assert not {"key", "cert", "ca", "token", "env"} & set(told)
        assert {peer["public_ip"] for peer in told["peers"]} <= {None, ""}


def test_errors_do_not_show_what_variables_held(seen: Seen) -> None:
    """SEC-15: neither the traceback nor any note."""

    @sky.compute
    def fail(what: str) -> None:
        held = os.environ["HF_TOKEN"]
        raise ValueError(f"{what} {len(held)}")

    with pytest.raises(ValueError, match="broken") as caught:
        fail("broken") >> seen.pool
    assert TAG not in str(caught.value) + "".join(caught.value.__notes__)


def test_what_a_body_shows_of_a_secret_does_not_come_home(seen: Seen) -> None:
    """SEC-9: as an argument that arrives as a Secret, and as a variable."""

    @sky.compute
    def show(token: sky.Secret) -> str:
        print("given", token, token.reveal(), os.environ["TYPED"], flush=True)
        raise ValueError(f"refused {token.reveal()}")

    with pytest.raises(ValueError, match=r"refused \*\*\*") as caught:
        show(sky.Secret(f"{TAG}-argument")) >> seen.pool
    assert TAG not in str(caught.value) + "".join(caught.value.__notes__)
    assert [text for text in seen.said if "given *** *** ***" in text]


def test_no_command_line_shows_a_secret(seen: Seen) -> None:
    """SEC-10, SEC-28: neither here nor on the hosts, from the first connection to the calls."""
    for expected in ("setup.sh", " pip install", "pip compile", "canary.git", "skyward.node.keeper"):
        assert [line for line in seen.commands if expected in line], expected
    assert shown(seen.commands) == []


def test_nothing_that_is_said_shows_a_secret(seen: Seen) -> None:
    """SEC-9, SEC-28: no event, log line, message or print. The last one, for it ends the pool."""
    with redirect_stdout(seen.printed), redirect_stderr(seen.printed):
        seen.pool.close()
    said = [*seen.said, seen.printed.getvalue()]
    for expected in ("installing packages", "skycanary==7", "PoolClosed"):
        assert [text for text in said if expected in text], expected
    assert shown(said) == []

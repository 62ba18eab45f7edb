"""Every code block of the documents runs as it is written, on the test cloud with real hosts behind it.

`make test` runs the quick ones and checks the types of all; `make soak` runs all of them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from skyward.machines.ledger import histories
from tests.cloud.machines import Hosts, specs
from tests.seeds.blocks import ABSENT, Block, blocks
from tests.seeds.fillings import FILLINGS, Filling
from tests.support.cloud import Cloud
from tests.support.hosts import Network, lacks_python, unavailable
from tests.support.leftovers import watchdogs
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
ALL = blocks()
CITED = re.compile(r'--8<-- "(?P<path>[^":]+):(?P<first>\d+):(?P<last>\d+)"')
FRAMEWORKS = ("torch", "jax", "keras", "transformers", "joblib", "sklearn")
SOAK = "SKYWARD_SOAK" in os.environ

pytestmark = pytest.mark.skipif(not ALL, reason=ABSENT)


def citing(block: Block) -> re.Match[str] | None:
    """The lines of an example that a block consists of."""
    return CITED.fullmatch(block.text.strip())


def program(block: Block, filling: Filling) -> str:
    """The block between what it leaves open and what must come of it."""
    start = f"""
import skyward as sky
from tests.seeds.stand_ins import Heard, asked, prepare
prepare(*{filling.stand_ins!r})
"""
    return f"{start}{filling.before}\n{block.text}\n{filling.after}"


RUN = [b for b in ALL if b.language == "python" and not citing(b)]


@pytest.fixture(scope="module")
def cloud(
    hosts_cache: Path, client_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cloud, dict[str, str]]]:
    """A cloud with hosts behind it, and the variables by which a program finds it."""
    if reason := unavailable() or lacks_python():
        pytest.skip(reason)
    with Network(specs(hosts_cache, 24), internet=True, idle=True) as network:
        hosts = Hosts(network, tmp_path_factory.mktemp("machines"))
        with Cloud(hosts) as served:
            hosts.end = served.end
            variables = {
                **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                **served.environ,
                "PYTHONPATH": str(ROOT),
                "SKYWARD_CACHE": str(client_cache),
            }
            yield served, variables
        hosts.close()


def test_every_block_has_a_filling_or_cites_an_example() -> None:
    unknown = [b.name for b in ALL if b.name not in FILLINGS and not citing(b)]
    assert unknown == []
    assert [name for name in FILLINGS if name not in {b.name for b in ALL}] == []


@pytest.mark.parametrize("block", RUN, ids=lambda b: b.name)
def test_the_block_is_python(block: Block) -> None:
    ast.parse(block.text)
    ast.parse(program(block, FILLINGS[block.name]))


@pytest.mark.parametrize("block", [b for b in ALL if citing(b)], ids=lambda b: b.name)
def test_the_lines_that_a_block_cites_are_there(block: Block) -> None:
    cited = citing(block)
    assert cited
    lines = (ROOT / cited["path"]).read_text().splitlines()[int(cited["first"]) - 1 : int(cited["last"])]
    assert all(line.strip() for line in (lines[0], lines[-1]))
    assert lines[0].strip() in "\n".join(page.read_text() for page in (ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "bash"], ids=lambda b: b.name)
def test_the_program_of_a_shell_block_is_there(block: Block) -> None:
    """It is run by tests/e2e/frameworks/test_examples_torch.py, as it is."""
    script = FILLINGS[block.name].script
    assert script
    assert (ROOT / script).is_file()
    assert block.text.rstrip().endswith(f"python {script}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", RUN, ids=lambda b: b.name)
def test_the_block_runs_as_it_is_written(
    block: Block, cloud: tuple[Cloud, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling = FILLINGS[block.name]
    if missing := [name for name in FRAMEWORKS if find_spec(name) is None]:
        pytest.skip(f"this computer has no {', '.join(missing)}")
    if not SOAK and not filling.quick:
        pytest.skip("make soak runs it")
    served, variables = cloud
    served.forget()
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    path = tmp_path / "program.py"
    path.write_text(program(block, filling))
    variables = {**variables, "SKYWARD_STATE": os.environ["SKYWARD_STATE"]}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=variables, timeout=840, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (served.leftovers(), list(histories())) == ([], [])
    until(lambda: not watchdogs(), 60)

"""Code blocks of README and docs that quote no example: Python is run, commands name what exists.

Blocks that need machines elsewhere run as they are, but on nodes of this computer: providers, images and accelerators
are made as written, and the pool leaves them out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skyward as sky
from skyward.cli.main import COMMANDS
from tests.test_docs import BLOCK, PAGES, ROOT, SOURCE

ELSEWHERE = {  # pages whose other blocks are run as a whole
    "pool-methods.md": "tests/e2e/test_reference.py",
    "write-a-provider.md": "tests/providers/test_written_provider.py",
    "write-a-plugin.md": "tests/plugins/test_written_plugin.py",
}
CLOUD = "tests/testing/test_cloud.py"  # runs the block of aws.md that is a test


def loose() -> Iterator[Any]:
    for page in PAGES:
        if page.name in ELSEWHERE:
            continue
        for match in BLOCK.finditer(page.read_text()):
            line = page.read_text()[: match.start()].count("\n") + 1
            if not SOURCE.match(match["body"]) and "import pytest" not in match["body"]:
                yield pytest.param(match["body"], id=f"{page.name}:{line}")


@pytest.mark.parametrize("body", list(loose()))
def test_python_that_quotes_no_example_runs(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = ModuleType("mine")
    mine.train = sky.instance_info  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    monkeypatch.setenv("HF_TOKEN", "a token for tests")
    monkeypatch.setenv("INDEX_TOKEN", "another one for tests")
    given = sky.ComputePool

    def here(*specs: Any, **options: Any) -> sky.ComputePool:
        _ = given(*specs, **options)  # as it is written: a wrong name or value is refused
        ranks = options.get("processes_per_node", 1)
        return given(nodes=options.get("nodes") or 2, console=False, processes_per_node=ranks)

    monkeypatch.setattr(sky, "ComputePool", here)
    monkeypatch.setattr(sky.integrations, "torch", lambda fn: fn)
    monkeypatch.setattr(sky.integrations, "transformers", lambda **options: lambda fn: fn)
    names: dict[str, Any] = {"sky": sky, "hosts": sky.SSH(hosts=["gpu1", "gpu2", "gpu3"]), "__name__": "__main__"}
    names["train"] = sky.compute(sky.instance_info)
    for name in ("id_ed25519", "known_hosts"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text("looks like a PRIVATE KEY\n")
    exec(compile(body.replace("/tmp/skyward-hosts/3/ssh", str(tmp_path)), "a block", "exec"), names)


def test_pages_that_are_run_as_a_whole_have_their_tests() -> None:
    for page, test in [*ELSEWHERE.items(), ("aws.md", CLOUD)]:
        assert page in (ROOT / test).read_text(), f"{test} does not read {page}"


def commands() -> Iterator[Any]:
    shell = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
    for page in PAGES:
        for match in shell.finditer(page.read_text()):
            for line in match[1].splitlines():
                if re.match(r"(make|sky|python) ", line):
                    words = shlex.split(line, comments=True)
                    yield pytest.param(words, id=f"{page.name}-{' '.join(words)[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_name_what_exists(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), f"there is no `make {words[1]}`"
    elif words[0] == "sky":
        assert any(words[1] in names for names in COMMANDS.values()), f"there is no `sky {words[1]}`"
    elif words[1] == "-m":
        assert (ROOT / words[2].replace(".", "/")).exists() or (ROOT / f"{words[2].replace('.', '/')}.py").exists()
    else:
        program = (ROOT / words[1]).read_text()
        for option in words[2:]:
            assert not option.startswith("--") or f'"{option.partition("=")[0]}"' in program, (
                f"{words[1]} has no {option}"
            )


def test_every_example_that_is_quoted_is_run() -> None:
    tests = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    quoted = {match[1] for page in PAGES for match in SOURCE.finditer(page.read_text())}
    for source in sorted(quoted):
        globbed = source.startswith(("examples/tutorial/", "examples/extensions/"))  # run by what finds all of them
        assert globbed or Path(source).stem in tests, f"no test names {source}"

"""`make test` runs every test once."""

from __future__ import annotations

from collections import Counter

from tests.lanes import PARTS, ROOT, arguments_of


def test_every_file_of_tests_is_in_one_part() -> None:
    runs: Counter[str] = Counter()
    for part in PARTS:
        arguments = arguments_of(part)
        left_out = [argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--")]
        for folder in arguments[: len(PARTS[part])]:
            found = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("test_*.py")]
            assert found, folder
            runs.update(path for path in found if not any(path.startswith(f"{other}/") for other in left_out))
    everything = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert runs == Counter(everything)

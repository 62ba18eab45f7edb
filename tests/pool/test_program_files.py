"""Which files a program needs on another machine."""

from __future__ import annotations

import sys
from pathlib import Path

from skyward.pool.program_files import imported, loaded, own_folders


def test_what_a_program_imports_from_its_folder_is_found_also_indirectly(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, first\ndef later():\n    from package.sub import x\n")
    (tmp_path / "first.py").write_text("import second.part as part\n")
    (tmp_path / "unused.py").write_text("")
    for package, text in (("second", "from . import other\n"), ("package", "import third\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "third.py").write_text("not python")
    (tmp_path / "data").mkdir()
    found = imported([tmp_path / "train.py"], [tmp_path])
    assert sorted(path.name for path in found) == ["first.py", "package", "second", "third.py"]


def test_modules_of_the_environment_are_not_the_users(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    assert here in loaded(here.parent)
    assert not [path for path in loaded(Path("/")) if "site-packages" in path.parts]
    assert loaded(tmp_path) == []


def test_an_environment_below_the_working_directory_is_not_sent(tmp_path: Path) -> None:
    found = own_folders([Path(path).resolve() for path in [*sys.path, str(tmp_path / "lib")]], Path("/"))
    assert tmp_path / "lib" in found
    assert not [path for path in found if "site-packages" in path.parts or path.name == "lib-dynload"]

"""How an exception crosses: same type, its chain, its notes, and the traceback as text."""

from __future__ import annotations

import asyncio
import linecache
import os
import subprocess
import sys
import textwrap
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from skyward.api.secret import Secret
from skyward.errors import RemoteError
from skyward.transport import exceptions


class Custom(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail

    def __reduce__(self) -> Any:
        return _custom, (self.code, self.detail)


def _custom(code: int, detail: str) -> Custom:
    return Custom(code, detail=detail)


class Forgetful(Exception):
    """Cannot be rebuilt: its arguments do not reach the base class."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as exc:
        return exc


def across(error: BaseException) -> BaseException:
    return exceptions.rebuild(*exceptions.capture(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3),
        KeyError("missing"),
        FileNotFoundError(2, "No such file", "/tmp/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("so"),
        subprocess.CalledProcessError(3, ["ls"], b"out", b"err"),
        Custom(7, detail="seven"),
        OSError(),
    ],
)
def test_type_arguments_and_fields_are_kept(error: BaseException) -> None:
    """T11."""
    again = across(raised(error))
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)
    if not isinstance(error, KeyError | StopIteration):
        assert {k: v for k, v in vars(again).items() if k != "__notes__"} == vars(error)


def test_groups_are_kept_with_their_parts() -> None:
    again = across(raised(ExceptionGroup("two", [ValueError(1), ExceptionGroup("inner", [KeyError(2)])])))
    assert isinstance(again, ExceptionGroup)
    matched = again.subgroup(KeyError)
    assert matched is not None


def test_the_chain_of_causes_is_kept() -> None:
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("second")  # noqa: B904 - the context is what is tested
        except ValueError as exc:
            raise RuntimeError("third") from exc
    except RuntimeError as exc:
        again = across(exc)
    assert isinstance(again.__cause__, ValueError)
    assert again.__suppress_context__
    assert isinstance(again.__cause__.__context__, KeyError)
    assert again.__cause__.__cause__ is None


def test_from_none_stays_from_none() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None
    except ValueError as exc:
        again = across(exc)
    assert again.__suppress_context__
    assert again.__cause__ is None
    assert "hidden" not in "".join(traceback.format_exception(again))


def test_a_chain_that_runs_in_a_circle_or_without_end_is_cut() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert isinstance(across(first), ValueError)
    error = ValueError(0)
    for number in range(1, 100):
        outer = ValueError(number)
        outer.__cause__ = error
        error = outer
    again: BaseException | None = across(error)
    length = 0
    while again is not None:
        again, length = again.__cause__, length + 1
    assert 10 <= length <= 20


def test_notes_are_kept_and_ours_comes_last() -> None:
    error = raised(ValueError("x"))
    error.add_note("the user's note")
    about, data = exceptions.capture(error)
    again = exceptions.annotate(exceptions.rebuild(about, data), about, "raised on node 2 in train")
    assert again.__notes__[0] == "the user's note"
    assert again.__notes__[-1].startswith("raised on node 2 in train")
    assert "remote traceback:" in again.__notes__[-1]
    assert "raised(ValueError" in again.__notes__[-1] or "raise error" in again.__notes__[-1]


def test_frames_of_ours_before_the_users_are_left_out() -> None:
    space: dict[str, Any] = {"raised": raised, "ValueError": ValueError}
    ours = str(Path(exceptions.__file__).parents[1] / "node" / "body.py")
    source = "def call():\n    try:\n        users()\n    except ValueError as exc:\n        return exc\n"
    exec(compile(source, ours, "exec"), space)
    exec(compile("def users():\n    raise ValueError('x')\n", "program.py", "exec"), space)
    about, _ = exceptions.capture(space["call"]())
    assert "body.py" not in about["traceback"]
    assert 'File "program.py", line 2, in users' in about["traceback"]


def test_lines_of_source_that_only_this_computer_has_are_filled_in(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("x = 1\ny = x / 0\n")
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    secret = tmp_path / "secret.txt"
    secret.write_text("of no concern\n")
    text = "".join(f'  File "{path}", line 2, in f\n' for path in (program, pipe, "/dev/zero", secret, "/no\0where.py"))
    error = exceptions.annotate(ValueError("x"), {"type": "ValueError", "message": "x", "traceback": text}, "there")
    assert f'File "{program}", line 2, in f\n    y = x / 0\n' in error.__notes__[0]
    assert error.__notes__[0].count("    ") == 1


def test_a_frame_with_an_endless_number_is_text() -> None:
    text = f'  File "a.py", line {"9" * 5000}, in f\n'
    error = exceptions.annotate(ValueError("x"), {"type": "ValueError", "message": "x", "traceback": text}, "there")
    assert text.rstrip() in error.__notes__[0]


def test_a_traceback_that_names_every_file_has_few_read_and_none_kept(tmp_path: Path) -> None:
    """SEC-7"""
    paths = [tmp_path / f"{i}.py" for i in range(200)]
    for path in paths:
        path.write_text("x = 1\n")
    text = "".join(f'  File "{path}", line 1, in f\n' for path in paths)
    error = exceptions.annotate(ValueError("x"), {"type": "ValueError", "message": "x", "traceback": text}, "there")
    assert error.__notes__[0].count("    x = 1") == 100
    assert not linecache.cache.keys() & set(map(str, paths))


def test_texts_of_nodes_are_kept_up_to_a_limit() -> None:
    """SEC-7"""
    described = {"type": "ValueError", "message": "m" * 10_000_000, "traceback": "t" * 10_000_000}
    error = exceptions.packed(described, b"", "there").rebuilt()
    assert len("".join(traceback.format_exception(error))) < 2_000_000


def test_what_an_exception_holds_shows_no_secret() -> None:
    """SEC-9: also in dicts, sets and bytes, as errors of web clients have them."""
    secret = Secret("correct-horse-battery")
    text = secret.reveal()
    error = ValueError({"key": [text], text: 1}, {f"a {text}"}, f"b {text}".encode(), {1: (frozenset([text]), None)})
    error.headers = {"Authorization": f"Bearer {text}"}  # type: ignore[attr-defined]
    again: Any = exceptions.rebuild(*exceptions.capture(raised(error)))
    assert again.args == ({"key": ["***"], "***": 1}, {"a ***"}, b"b ***", {1: (frozenset(["***"]), None)})
    assert again.headers == {"Authorization": "Bearer ***"}


def test_a_line_of_source_that_is_filled_in_shows_no_secret(tmp_path: Path) -> None:
    """SEC-9"""
    program = tmp_path / "program.py"
    program.write_text("login('correct-horse-battery')\n")
    secret = Secret("correct-horse-battery")
    text = f'  File "{program}", line 1, in f\n'
    error = exceptions.annotate(ValueError("x"), {"type": "ValueError", "message": "x", "traceback": text}, "there")
    assert "login('***')" in error.__notes__[0]
    assert secret.reveal() not in error.__notes__[0]


def test_notes_of_the_users_come_once() -> None:
    error = raised(ValueError("x"))
    error.add_note("only once")
    about, data = exceptions.capture(error)
    again = exceptions.annotate(exceptions.rebuild(about, data), about, "there")
    assert "".join(traceback.format_exception(again)).count("only once") == 1


def test_an_exception_that_python_cannot_pickle_keeps_its_type_and_attributes() -> None:
    """Row 7: its __init__ does not take what its args hold."""
    error = Forgetful(1, 2)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.code = 7  # type: ignore[attr-defined]
    again = exceptions.rebuild(*exceptions.capture(raised(error)))
    assert type(again) is Forgetful
    assert again.args == error.args
    assert again.code == 7  # type: ignore[attr-defined]
    assert not hasattr(again, "lock")


def test_what_cannot_travel_arrives_as_text() -> None:
    error = ValueError(threading.Lock())
    about, data = exceptions.capture(raised(error))
    assert data == b""
    again = exceptions.rebuild(about, data)
    assert isinstance(again, RemoteError)
    assert type(error).__name__ in str(again)
    assert again.traceback
    assert len(again.message) < 300_000


class Refusal(Exception):
    """Its __init__ does not take what its args hold."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"refused with {code}: {text}")
        self.code = code


LARGE = 2 << 20


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("x" * LARGE + "the end"), "the end"),
        (Refusal(7, "x" * LARGE + "the end"), "the end"),
        (KeyError(list(range(LARGE))), "list, left out"),
        (FileNotFoundError(2, "No such file", "x" * LARGE + "end"), "[Errno 2] No such file"),
        (UnicodeDecodeError("utf-8", b"ab\xff" + b"a" * LARGE, 2, 3, "bad byte"), "0xff in position 2: bad byte"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_with_large_arguments_keeps_its_type(error: Exception, said: str) -> None:
    about, data = exceptions.capture(raised(error))
    assert len(data) < 1 << 20
    again = exceptions.packed(about, data, "there").rebuilt()
    assert type(again) is type(error)
    assert said in str(again)
    assert len(str(again)) < 100_000
    assert getattr(again, "code", 7) == 7


def test_a_local_class_travels_with_its_exception() -> None:
    class Here(Exception):
        pass

    again = across(raised(Here("x")))
    assert type(again).__name__ == "Here"
    assert again.args == ("x",)


def test_a_class_that_does_not_exist_here_arrives_as_text() -> None:
    about, _ = exceptions.capture(raised(ValueError("of the node")))
    again = exceptions.rebuild(about, b"\x80\x05cnowhere_at_all\nError\n.")
    assert isinstance(again, RemoteError)
    assert "of the node" in str(again)
    assert "nowhere_at_all" in str(again)


def test_an_exception_whose_text_raises_is_still_told() -> None:
    about, data = exceptions.capture(raised(Rude()))
    assert "Rude" in about["type"]
    assert "no message" in about["message"]
    assert isinstance(exceptions.rebuild(about, data), Rude)


def test_one_member_of_the_chain_that_cannot_travel_does_not_hide_the_outermost() -> None:
    """The exception itself is sound; what hangs on it is told in the traceback."""
    try:
        try:
            raise ValueError(threading.Lock())
        except ValueError as exc:
            raise KeyError("outer") from exc
    except KeyError as exc:
        about, data = exceptions.capture(exc)
    again = exceptions.rebuild(about, data)
    assert isinstance(again, KeyError)
    assert "lock" in about["traceback"]


def test_long_texts_are_cut_at_their_beginning() -> None:
    about, _ = exceptions.capture(raised(ValueError("a" * 400_000 + "the end")))
    assert about["message"].endswith("the end")
    text = about["message"]
    for limit in (256 << 10, 100_000, 1000):  # it is cut on the node, by the client, and for the history
        text = exceptions._tail(text, limit)  # pyright: ignore[reportPrivateUsage]
        note, _, rest = text.partition("\n")
        assert len(text) <= limit
        assert int(note.split()[1].replace(",", "")) + len(rest) == 400_007


def test_a_library_that_changes_how_exceptions_are_pickled_does_no_harm() -> None:
    """distributed has tblib register reducers for every class of exception; a body may import it."""
    source = """
        import distributed
        from skyward.transport import exceptions
        error = UnicodeDecodeError("utf-8", bytes([255]), 0, 1, "bad")
        again = exceptions.rebuild(*exceptions.capture(error))
        assert type(again) is UnicodeDecodeError, again
        assert str(again) == str(error), str(again)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_the_notes_of_an_exception_whose_class_only_the_node_has_come_along() -> None:
    """E.g. one of torch, at a client that has no torch."""
    error = Custom(3, detail="d")
    error.add_note("the process was replaced")
    described, _ = exceptions.capture(raised(error))
    again = exceptions.rebuild(described, b"\x80\x04cno_such_module\nKind\n.")
    assert isinstance(again, RemoteError)
    assert again.__notes__ == ["the process was replaced"]
    again = exceptions.rebuild(*exceptions.capture(raised(error)))
    assert again.__notes__ == ["the process was replaced"]

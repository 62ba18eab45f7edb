"""Whose text is kept, and where it goes; in a process of one call, of many, and in a user's own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import io
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest

from skyward.api import info
from skyward.api.compute import compute
from skyward.api.info import InstanceInfo, Peer, call_context
from skyward.node import stdio
from skyward.node.stdio import CallbackWriter, redirect_output, silent, stderr, stdout

Emitted = list[tuple[str, str, str | None]]
Runner = Callable[[], Emitted]
Node = Callable[[int], None]
Capture = pytest.CaptureFixture[str]


def topology(node: int) -> str:
    peers = tuple(Peer(i, f"10.0.0.{i + 1}") for i in range(3))
    return InstanceInfo(node=node, total_nodes=3, head_addr="10.0.0.1", head_port=1, job_id="p", peers=peers).to_json()


pytestmark = pytest.mark.usefixtures("no_pool")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return lambda number: monkeypatch.setenv("COMPUTE_POOL", topology(number))


class Written(NamedTuple):
    stdout: str
    stderr: str


def run_as_runner(body: str) -> Written:
    """Run `body` in a process that routes its output as a runner of one call at a time does."""
    script = "import os, subprocess, sys, threading\nfrom skyward.node import stdio\nfrom skyward.node.stdio import *\n"
    script += "from skyward.api.info import call_context\nstdio.install(threads=False)\n" + textwrap.dedent(body)
    env = {**os.environ, "PYTHONPATH": str(Path(info.__file__).parents[2]), "COMPUTE_POOL": topology(1)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return Written(done.stdout.decode(), done.stderr.decode())  # line ends as they were written


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Makes this process one that runs calls in threads; gives what it hands to the runner."""

    def start() -> Emitted:
        emitted: Emitted = []
        for owner, name in ((sys, "stdout"), (sys, "stderr"), (threading.Thread, "start")):
            monkeypatch.setattr(owner, name, getattr(owner, name))
        monkeypatch.setattr(stdio, "_installed", {})
        monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)  # it could not be taken back
        stdio.install(threads=True, emit=lambda *text: emitted.append(text))
        return emitted

    return start


def in_call(name: str, body: Callable[[], Any]) -> Any:
    """Run `body` as a runner with threads does: in a context of its own, drained at its end."""

    def run() -> Any:
        with call_context(name, 0, threads=True):
            try:
                return body()
            finally:
                stdio.drain()

    return contextvars.Context().run(run)


def speak() -> str:
    print("out")
    print("err", file=sys.stderr)
    return "result"


# In a user's own process: nothing is installed.


def test_outside_a_pool_nothing_is_dropped(capsys: Capture) -> None:
    """D6, S1-45 to S1-48."""
    taken: list[str] = []
    for decorate in (stdout(only=lambda info: False), stderr(only="head"), silent, redirect_output(taken.append)):
        assert decorate(speak)() == "result"
        assert capsys.readouterr() == ("out\n", "err\n")
    with redirect_output(taken.append):
        speak()
    assert not taken


@pytest.mark.parametrize(("number", "kept"), [(0, "out\n"), (1, ""), (2, "")])
def test_only_the_head_is_heard(number: int, kept: str, node: Node, capsys: Capture) -> None:
    """S0-14, S1-45, S1-47, S4-24."""
    node(number)
    assert stdout(only="head")(speak)() == "result"
    assert capsys.readouterr() == (kept, "err\n")


def test_each_stream_has_its_own_decorator(node: Node, capsys: Capture) -> None:
    """S1-47, T16."""
    node(1)
    stderr(only="head")(speak)()
    assert capsys.readouterr() == ("out\n", "")


def test_a_predicate_chooses_nodes(node: Node, capsys: Capture) -> None:
    """S1-46."""
    heard: list[str] = []
    for number in range(3):
        node(number)
        stdout(only=lambda info: info.node < 2)(speak)()
        heard.append(capsys.readouterr().out)
    assert heard == ["out\n", "out\n", ""]


@pytest.mark.parametrize("decorate", [silent, silent()])
def test_silence_covers_both_streams_and_not_the_result(decorate: Any, node: Node, capsys: Capture) -> None:
    """S1-48."""
    node(0)
    assert decorate(speak)() == "result"
    assert capsys.readouterr() == ("", "")


def test_decorators_stack(node: Node, capsys: Capture) -> None:
    """S0-13."""
    node(1)
    taken: list[str] = []
    stdout(only="head")(stderr(only="head")(speak))()
    redirect_output(taken.append)(silent(speak))()
    silent(redirect_output(taken.append)(speak))()
    assert capsys.readouterr() == ("", "")
    assert taken == ["out\n"]


@pytest.mark.parametrize("only", ["haed", "", None, 0, ["head"]])
def test_an_unknown_choice_is_an_error_at_decoration(only: Any) -> None:
    """D6."""
    for decorator in (stdout, stderr):
        with pytest.raises(ValueError, match="'head'"):
            decorator(only=only)


@pytest.mark.parametrize("decorator", [stdout, stderr])
def test_a_bare_decorator_that_needs_a_choice_says_how_to_write_it(decorator: Any) -> None:
    for wrong in (lambda: decorator(print), lambda: decorator("head"), lambda: decorator()):
        with pytest.raises(ValueError, match=rf"@sky.{decorator.__name__}\(only='head'\)"):
            wrong()


def test_other_wrong_arguments_are_errors_at_decoration() -> None:
    with pytest.raises(ValueError, match="stderr"):
        redirect_output(print, stream="stder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a function"):
        redirect_output("print")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a function"):
        silent(3)  # type: ignore[call-overload]


def test_a_decorator_above_compute_is_refused() -> None:
    """S1-50."""
    with pytest.raises(ValueError, match=r"below @sky\.compute"):
        silent(compute(print))


def test_streams_come_back_when_the_body_raises(node: Node, capsys: Capture) -> None:
    """S1-49."""
    node(1)
    before = sys.stdout, sys.stderr

    @silent
    def fail() -> None:
        print("lost")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (sys.stdout, sys.stderr) == before
    print("back")
    assert capsys.readouterr().out == "back\n"


def test_signature_and_kind_of_function_are_kept() -> None:
    """The operators look at these to see what streams."""

    def plain(a: int, *, b: str = "") -> float:
        """Text."""
        return 0.0

    def generate() -> Iterator[int]:
        yield 1

    async def wait() -> None: ...

    async def generate_async() -> AsyncIterator[int]:
        yield 1

    for decorate in (silent, stdout(only="head"), redirect_output(print)):
        kept = decorate(plain)
        assert inspect.signature(kept) == inspect.signature(plain)
        assert (kept.__name__, kept.__doc__) == ("plain", "Text.")
        assert inspect.isgeneratorfunction(decorate(generate))
        assert inspect.iscoroutinefunction(decorate(wait))
        assert inspect.isasyncgenfunction(decorate(generate_async))


def test_decorated_functions_can_travel(node: Node, capsys: Capture) -> None:
    """S0-12."""
    node(1)
    for decorate in (silent, stdout(only=lambda info: False), redirect_output(lambda text: None)):
        cloudpickle.loads(cloudpickle.dumps(decorate(lambda: print("lost"))))()
    assert capsys.readouterr().out == ""


def test_a_generator_is_silent_while_its_own_code_runs(node: Node, capsys: Capture) -> None:
    """S1-49 for generators: between items the caller is heard."""
    node(1)
    seen: list[object] = []

    @silent
    def generate(first: int) -> Iterator[Any]:
        print("inside")
        try:
            seen.append((yield first))
            print("inside")
            yield 2
        except KeyError as error:
            seen.append(type(error))
            yield 3
        finally:
            print("inside at the end")
            seen.append("closed")

    generator: Any = generate(1)
    print("between", next(generator))
    print("between", generator.send("sent"))
    print("between", generator.throw(KeyError()))
    generator.close()
    assert seen == ["sent", KeyError, "closed"]
    assert capsys.readouterr().out == "between 1\nbetween 2\nbetween 3\n"


def test_a_generator_keeps_its_return_value_and_its_exceptions(node: Node) -> None:
    node(1)

    @silent
    def counts() -> Any:
        yield 1
        return "done"

    def outer() -> Any:
        return (yield from counts())

    generator = outer()
    assert next(generator) == 1
    with pytest.raises(StopIteration, match="done"):
        next(generator)

    @silent
    def fails() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(fails())


def test_async_functions_and_generators_are_silent_too(node: Node, capsys: Capture) -> None:
    node(1)

    @silent
    async def wait() -> int:
        print("inside")
        await asyncio.sleep(0)
        print("inside")
        return 7

    @silent
    async def generate() -> Any:
        try:
            print("inside")
            got = yield 1
            await asyncio.sleep(0)
            print("inside")
            yield got
        except KeyError:
            yield "caught"

    async def main() -> list[object]:
        seen: list[object] = [await wait()]
        generator = generate()
        seen.append(await anext(generator))
        print("between")
        seen.append(await generator.asend(5))
        seen.append(await generator.athrow(KeyError()))
        seen += [item async for item in generator]
        return seen

    assert asyncio.run(main()) == [7, 1, 5, "caught"]
    assert capsys.readouterr().out == "between\n"


def test_a_callback_gets_whole_lines(node: Node, capsys: Capture) -> None:
    """D6: redirect_output."""
    node(2)
    taken: list[str] = []

    @redirect_output(taken.append)
    def body() -> None:
        print("a", 1)
        print("b\nc")
        print("half", end="", flush=True)
        print("err", file=sys.stderr)
        print(" a line\nrest", end="")

    body()
    assert taken == ["a 1\n", "b\n", "c\n", "half", " a line\n", "rest"]
    assert capsys.readouterr() == ("", "err\n")


def test_a_callback_can_take_the_other_stream_or_both(node: Node, capsys: Capture) -> None:
    node(0)
    taken: list[str] = []
    with redirect_output(taken.append, stream="stderr"):
        speak()
    with redirect_output(taken.append, stream="both"):
        speak()
    assert taken == ["err\n", "out\n", "err\n"]
    assert capsys.readouterr() == ("out\n", "")


def test_what_a_callback_prints_does_not_come_back_to_it(node: Node, capsys: Capture) -> None:
    node(0)

    def callback(text: str) -> None:
        print("got", text, end="")
        print("too", file=sys.stderr)

    with redirect_output(callback, stream="both"):
        print("text")
        print("tail", end="")
    assert capsys.readouterr() == ("got text\ngot tail", "too\ntoo\n")


def test_a_callback_writer_passes_on_every_write() -> None:
    """D6: CallbackWriter."""
    taken: list[str] = []
    writer = CallbackWriter(taken.append)
    print("a", "b", file=writer)
    assert taken == ["a", " ", "b", "\n"]
    assert writer.write("xyz") == 3
    assert writer.writable()


def test_a_stream_of_the_users_own_is_covered_and_given_back(node: Node) -> None:
    node(1)
    with contextlib.redirect_stdout(io.StringIO()) as captured:
        silent(speak)()
        print("after")
        assert sys.stdout is captured
    assert captured.getvalue() == "after\n"


# In a process that runs one call at a time.


def test_silence_covers_c_code_and_subprocesses() -> None:
    """S1-48: also what does not pass through Python."""
    done = run_as_runner(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        def everything():
            print("python")
            print("python", file=sys.stderr)
            os.write(1, b"descriptor\\n"); os.write(2, b"descriptor\\n")
            subprocess.run("echo sub; echo sub >&2", shell=True)
            subprocess.run(["echo", "given"], stdout=sys.stdout)
            libc.printf(b"c without a line end")
        print("before", end=" ")
        silent(everything)()
        print("after")
        stdout(only="head")(everything)()
        everything()
        stdio.drain()
        """
    )
    heard = ["python", "descriptor", "sub", "given", "c without a line end"]
    assert done.stdout.splitlines() == ["before after", *heard]
    assert done.stderr.splitlines() == ["python", "descriptor", "sub"] * 2


def test_silence_ends_with_the_body_whatever_it_does() -> None:
    """S1-49."""
    done = run_as_runner(
        """
        @silent
        def inner(): print("inner")
        @silent
        def outer():
            inner()
            os.write(1, b"outer\\n")
            raise ZeroDivisionError
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            try: outer()
            except ZeroDivisionError: pass
            os.write(1, b"descriptor back\\n")
            print("python back")
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
        """
    )
    assert done.stdout.split("\n") == ["descriptor back", "python back"] * 3 + [""]


def test_overlapping_silences_end_in_any_order() -> None:
    """Two threads of one body, the first to start also the first to end."""
    done = run_as_runner(
        """
        first_in, second_in, first_out = (threading.Event() for _ in range(3))
        @silent
        def first():
            first_in.set(); second_in.wait(60)
        @silent
        def second():
            second_in.set(); first_out.wait(60); print("still silent")
        a = threading.Thread(target=first); a.start(); first_in.wait(60)
        b = threading.Thread(target=second); b.start(); a.join()
        print("still silent"); first_out.set(); b.join()
        print("back"); os.write(1, b"descriptor back\\n")
        """
    )
    assert done.stdout == "back\ndescriptor back\n"


def test_a_thread_left_in_silence_does_not_silence_the_next_call() -> None:
    done = run_as_runner(
        """
        inside, leave = threading.Event(), threading.Event()
        @silent
        def linger():
            inside.set(); leave.wait(60)
        thread = threading.Thread(target=linger)
        with call_context("call-1", 0, threads=False):
            thread.start(); inside.wait(60)
            print("silent")
            stdio.drain()
        with call_context("call-2", 0, threads=False):
            print("heard"); os.write(1, b"heard too\\n")
            leave.set(); thread.join()
            print("still heard")
        """
    )
    assert done.stdout == "heard\nheard too\nstill heard\n"


def test_a_callback_covers_the_threads_of_the_body() -> None:
    done = run_as_runner(
        """
        taken = []
        @redirect_output(taken.append)
        def body():
            thread = threading.Thread(target=print, args=("from a thread",)); thread.start(); thread.join()
        body()
        print(taken)
        """
    )
    assert done.stdout == "['from a thread\\n']\n"


def test_lines_are_live_and_progress_bars_too() -> None:
    """Issue: output arrives while the body runs. The process ends without flushing anything."""
    done = run_as_runner(
        """
        import ctypes
        print("line")
        print("\\r 50%", end="", file=sys.stderr)
        ctypes.CDLL(None).printf(b"from c\\n")
        sys.stdout.write("tail"); sys.stdout.flush()
        os._exit(0)
        """
    )
    assert done.stdout == "line\nfrom c\ntail"
    assert done.stderr == "\r 50%"


def test_a_routed_stream_serves_what_libraries_ask_of_stdout() -> None:
    done = run_as_runner(
        """
        s = sys.stdout
        assert (s.encoding, s.errors) == ("utf-8", "backslashreplace")
        assert (s.isatty(), s.writable(), s.fileno()) == (False, True, 1)
        assert s.write("abc\\n") == 4
        s.writelines(["d\\n", "e\\n"])
        s.reconfigure(line_buffering=True)
        print("x", end=""); s.buffer.write(b"A raw\\n"); s.buffer.flush()
        print("lone \\udc80 surrogate, snow \\u2603")
        try: s.write(b"bytes")
        except TypeError as error: print("str" in str(error))
        s.close(); print("open", s.closed)
        """
    )
    assert done.stdout == "abc\nd\ne\nxA raw\nlone \\udc80 surrogate, snow \u2603\nTrue\nopen False\n"


def test_a_fork_repeats_no_text() -> None:
    """faults.md 12 and 37: a body may fork."""
    done = run_as_runner(
        """
        print("once ", end="")
        pid = os.fork()
        if pid == 0:
            print("child"); sys.stdout.flush(); os._exit(0)
        os.waitpid(pid, 0)
        print("parent")
        """
    )
    assert done.stdout == "once child\nparent\n"


def test_twenty_thousand_lines_arrive_whole_and_in_order() -> None:
    """Issue: none lost or doubled."""
    done = run_as_runner("for i in range(20_000): print('line', i)")
    assert done.stdout.splitlines() == [f"line {i}" for i in range(20_000)]


# In a process that runs calls in threads.


def test_text_is_given_to_the_runner_line_by_line_with_its_call(runner: Runner) -> None:
    emitted = runner()

    def body() -> None:
        print("a", 1)
        sys.stderr.write("b\nc\nhalf")
        print("!", file=sys.stderr)
        print("progress", end="\r", flush=True)
        print("left over", end="")

    in_call("call-1", body)
    print("no call")
    assert emitted == [
        ("stdout", "a 1\n", "call-1"),
        ("stderr", "b\nc\n", "call-1"),
        ("stderr", "half!\n", "call-1"),
        ("stdout", "progress\r", "call-1"),
        ("stdout", "left over", "call-1"),
        ("stdout", "no call\n", None),
    ]


def test_silencing_one_call_leaves_its_neighbours_audible(runner: Runner, node: Node) -> None:
    """T14."""
    emitted = runner()
    node(1)
    both_inside = threading.Barrier(2, timeout=60)

    def body() -> None:
        both_inside.wait()
        speak()
        both_inside.wait()

    with ThreadPoolExecutor(2) as pool:
        quiet = pool.submit(in_call, "quiet", silent(body))
        loud = pool.submit(in_call, "loud", body)
        quiet.result()
        loud.result()
    assert emitted == [("stdout", "out\n", "loud"), ("stderr", "err\n", "loud")]


def test_each_call_has_its_own_callback(runner: Runner, node: Node) -> None:
    """T14."""
    emitted = runner()
    node(1)
    both_inside = threading.Barrier(2, timeout=60)
    taken: dict[str, list[str]] = {"a": [], "b": []}

    def body(name: str) -> None:
        with redirect_output(taken[name].append):
            both_inside.wait()
            print("from", name)
            both_inside.wait()

    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(in_call, name, lambda name=name: body(name)) for name in taken]:
            call.result()
    assert taken == {"a": ["from a\n"], "b": ["from b\n"]}
    assert emitted == []


def test_threads_of_a_body_belong_to_its_call(runner: Runner, node: Node) -> None:
    """T14: also what the body's own threads print."""
    emitted = runner()
    node(1)

    def body() -> None:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        assert "run" not in vars(thread)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(print, "from a pool", end="").result()

    in_call("loud", body)
    in_call("quiet", silent(body))
    assert emitted == [("stdout", "from a thread\n", "loud"), ("stdout", "from a pool", "loud")]


def test_a_thread_still_cannot_be_started_twice(runner: Runner) -> None:
    emitted = runner()
    stdio.install(threads=True, emit=lambda *text: emitted.append(text))
    thread = threading.Thread(target=print, args=("once",))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()
    assert emitted == [("stdout", "once\n", None)]


def test_lines_of_several_threads_stay_whole(runner: Runner) -> None:
    emitted = runner()

    def body() -> None:
        threads = [threading.Thread(target=lambda n=n: [print(n, n) for _ in range(300)]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    in_call("call", body)
    assert sorted(text for _, text, _ in emitted) == sorted(f"{n} {n}\n" for n in range(4) for _ in range(300))


def test_coroutines_are_silent_apart_from_each_other(runner: Runner, node: Node) -> None:
    """T14, within one event loop."""
    emitted = runner()
    node(1)

    async def speak_twice(name: str) -> None:
        print(name)
        await asyncio.sleep(0)
        print(name)

    async def main() -> None:
        await asyncio.gather(silent(speak_twice)("quiet"), speak_twice("loud"))

    in_call("call", lambda: asyncio.run(main()))
    assert emitted == [("stdout", "loud\n", "call")] * 2


def test_a_line_without_end_goes_on_in_pieces(runner: Runner) -> None:
    emitted = runner()
    in_call("call", lambda: [print(".", end="") for _ in range(2000)])
    assert "".join(text for _, text, _ in emitted) == "." * 2000
    assert 2 <= len(emitted) <= 10


def test_what_cannot_be_encoded_is_given_as_escapes(runner: Runner) -> None:
    emitted = runner()
    print("lone \udc80, snow \u2603")
    sys.stdout.buffer.write(b"\xff\n")
    assert emitted == [("stdout", "lone \\udc80, snow \u2603\n", None), ("stdout", "\\xff\n", None)]


def test_a_subprocess_given_a_silent_stream_is_silent(runner: Runner, node: Node) -> None:
    runner()
    node(1)
    null = silent(lambda: os.fstat(sys.stdout.fileno()))()
    assert null.st_rdev == os.stat(os.devnull).st_rdev
    assert sys.stdout.fileno() == 1


def test_log_handlers_follow_the_call_that_logs(runner: Runner, node: Node) -> None:
    emitted = runner()
    node(1)
    handler = logging.StreamHandler()
    log = logging.Logger("test")
    log.addHandler(handler)
    in_call("quiet", silent(lambda: log.warning("lost")))
    in_call("loud", lambda: log.warning("heard"))
    assert emitted == [("stderr", "heard\n", "loud")]

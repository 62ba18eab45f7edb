"""What a hostile node may say while it is pulled from: nothing of it leads out of the folder that the user names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward.client.files import Answers, Pull, Transfers
from skyward.errors import PoolClosed, SkywardError, TransferError
from skyward.node.protocol import AgentToClient
from skyward.transport.frames import Malformed
from skyward.transport.trees import leads_out

Answering = Callable[[dict[str, Any]], list[tuple[dict[str, Any], list[Any]]]]


class FarEnd:
    """A node that says what a test wants, in the place of an engine."""

    def __init__(self, answer: Answering) -> None:
        self.answer, self.asked = answer, list[dict[str, Any]]()

    def ask_files(self, node: int, order: dict[str, Any]) -> Answers:
        self.asked.append(order)
        answers = Answers(node)
        for came in self.answer(order):
            answers.put(came)
        return answers


def pulled(target: Path, entries: list[Any], folder: bool = True, data: bytes = b"evil", **more: Any) -> Any:
    def answer(order: dict[str, Any]) -> list[tuple[dict[str, Any], list[Any]]]:
        if order["do"] == "scan":
            return [({"entries": entries, "root": "/there", "folder": folder, "left_out": []} | more, [])]
        pieces = [[len(data), len(data), 1] for _ in order["pieces"]]
        return [({"pieces": pieces}, [data * len(pieces)])]

    far: Any = FarEnd(answer)
    return Pull(far, 0, lambda text: None).run("x", str(target), lambda size: lambda more: None)


def file(path: str, size: int = 4) -> list[Any]:
    return [path, "f", size, 1, 0o644, ""]


def link(path: str, target: str) -> list[Any]:
    return [path, "l", 0, 0, 0, target]


ROOT = ["", "d", 0, 0, 0o755, ""]

HOSTILE = {
    "up": [file("../evil")],
    "up inside": [file("a/../../evil")],
    "absolute": [file("{}/evil")],
    "empty step": [file("a//evil")],
    "dot": [file("./evil")],
    "nul": [file("evil\0")],
    "no text": [file("\ud800")],
    "long name": [file("x" * 300)],
    "long path": [file("/".join(["x" * 200] * 30))],
    "deep": [file("/".join("x" * 200))],
    "absolute link": [link("evil", "{}")],
    "link up": [link("evil", "..")],
    "link up and down": [link("evil", "../else")],
    "link over another link": [["d", "d", 0, 0, 0o755, ""], link("d/l", ".."), link("evil", "d/l/..")],
    "link without target": [link("evil", "")],
    "link with nul": [link("evil", "a\0b")],
    "file through a link": [["d", "d", 0, 0, 0o755, ""], link("d/l", ".."), file("d/l/evil")],
    "twice": [file("evil"), file("evil")],
    "device": [["evil", "c", 0, 0, 0o644, ""]],
    "setuid": [["evil", "f", 4, 1, 0o4755, ""]],
    "negative size": [["evil", "f", -1, 1, 0o644, ""]],
    "endless size": [["evil", "f", 1 << 70, 1, 0o644, ""]],
    "more than there is room": [["evil", "f", 1 << 60, 1, 0o644, ""]],
    "number as a name": [[3, "f", 4, 1, 0o644, ""]],
    "too few parts": [["evil", "f"]],
    "no entry": ["evil"],
}


def _in(outside: Path, entries: list[Any]) -> list[Any]:
    """The entries, with a place outside of the folder in those that name one."""
    return [
        [part.replace("{}", str(outside)) if isinstance(part, str) else part for part in entry]
        if isinstance(entry, list)
        else entry
        for entry in entries
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_node_writes_nothing_outside_the_folder(name: str, tmp_path: Path) -> None:
    """SEC-19."""
    target = tmp_path / "a" / "b"
    with pytest.raises(TransferError):
        pulled(target, [ROOT, *_in(tmp_path, HOSTILE[name])])
    outside = [path for path in tmp_path.rglob("*") if path != target.parent and not path.is_relative_to(target)]
    assert outside == []
    assert not [path for path in tmp_path.rglob("*") if path.name == "evil"]


@pytest.mark.parametrize(
    "entries", [[ROOT], [link("x", "y")], [file("x"), file("y")], [["x", "d", 0, 0, 0o755, ""]], []]
)
def test_what_is_no_folder_is_one_file(entries: list[Any], tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="invalid list of files"):
        pulled(tmp_path / "x", entries, folder=False)


def test_a_node_does_not_choose_the_name_of_a_single_file(tmp_path: Path) -> None:
    pulled(tmp_path / "mine", [file("..evil")], folder=False)
    assert os.listdir(tmp_path) == ["mine"]


def test_more_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="invalid list of files"):
        pulled(tmp_path / "x", [ROOT, file("small", 1)], data=b"far more")
    assert not (tmp_path / "x" / "small").exists()


def test_a_file_that_became_shorter_is_not_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="became shorter"):
        pulled(tmp_path / "x", [ROOT, file("long", 1000)])
    assert not (tmp_path / "x" / "long").exists()


@pytest.mark.parametrize("pieces", [None, [], [[4]], [[4, 4, 1], [4, 4, 1]], [["4", 4, 1]], [{}], "x"])
def test_an_answer_without_its_parts_is_refused(pieces: Any, tmp_path: Path) -> None:
    def answer(order: dict[str, Any]) -> list[tuple[dict[str, Any], list[Any]]]:
        if order["do"] == "scan":
            return [({"entries": [ROOT, file("f")], "root": "/there", "folder": True}, [])]
        return [({"pieces": pieces}, [b"evil"])]

    far: Any = FarEnd(answer)
    with pytest.raises(TransferError):
        Pull(far, 0, lambda text: None).run("x", str(tmp_path / "x"), lambda size: lambda more: None)


@pytest.mark.parametrize(
    ("path", "target", "out"),
    [
        ("a", "b", False),
        ("a", "./b/c", False),
        ("a", "..", True),
        ("a", "/b", True),
        ("d/a", "../b", False),
        ("d/a", "..", False),
        ("d/a", "../..", True),
        ("d/a", "../e/../..", True),
        ("d/a", "e/../b", True),
        ("d/e/a", "../../b//c", False),
        ("a", "...", False),
    ],
)
def test_a_link_leads_out_by_more_steps_up_than_it_is_deep(path: str, target: str, out: bool) -> None:
    assert leads_out(path, target) is out


def test_a_lost_node_and_a_closed_pool_end_the_wait() -> None:
    posted: list[Any] = []
    transfers = Transfers(lambda node, messages: posted.append((node, messages)))
    first, second, third = (transfers.ask(node, {"do": "look", "path": "x"}) for node in (0, 1, 1))
    transfers.lost(0, "it is gone")
    with pytest.raises(TransferError, match=r"'x' on node 0: the node is lost \(it is gone\). What was copied stays"):
        first.next()
    transfers.answered(AgentToClient.Files(2, {"folder": True}, []), 1, 0.0)
    assert second.next() == ({"folder": True}, [])
    transfers.close()
    with pytest.raises(PoolClosed):
        third.next()
    transfers.answered(AgentToClient.Files(2, {"folder": True}, []), 1, 0.0)  # nobody waits any more


def test_what_is_asked_while_the_pool_closes_is_answered() -> None:
    """A thread that found the pool open may ask just after it was closed."""
    posted: list[Any] = []
    transfers = Transfers(lambda node, messages: posted.append((node, messages)))
    transfers.close()
    with pytest.raises(PoolClosed):
        transfers.ask(0, {"do": "look", "path": "x"}).next()
    assert not posted


def test_answers_without_end_break_the_link() -> None:
    transfers = Transfers(lambda node, messages: None)
    transfers.ask(0, {"do": "scan", "path": "x"})
    with pytest.raises(Malformed):
        for _ in range(10_000):
            transfers.answered(AgentToClient.Files(1, {"entries": []}, []), 0, 0.0)
    transfers.answered(AgentToClient.Files(1, {"entries": []}, []), 1, 0.0)  # another node's answer is not heard


def test_what_a_node_cannot_do_is_an_error_with_its_reason() -> None:
    answers = Answers(3)
    answers.put(({"error": {"errno": 28, "text": "No space left on device", "path": "data/x"}}, []))
    with pytest.raises(SkywardError, match=r"'data/x' on node 3: no space left on device. Make room there"):
        answers.next()


def test_nobody_else_may_write_to_what_was_pulled(tmp_path: Path) -> None:
    """SEC-19."""
    entries = [["", "d", 0, 0, 0o777, ""], ["open", "f", 4, 1, 0o777, ""], ["shared", "f", 4, 1, 0o664, ""]]
    for _ in range(2):  # the second time nothing is left to do, and modes stay
        pulled(tmp_path / "there", entries)
        modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "there").iterdir()}
        assert modes == {"open": 0o755, "shared": 0o644}
        assert (tmp_path / "there").stat().st_mode & 0o7777 == 0o755

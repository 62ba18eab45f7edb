"""What every message looks like on the wire: old and new versions of a process must understand each other."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from skyward.node import orders, protocol
from skyward.node.shared import protocol as shared_protocol
from skyward.transport import codec
from skyward.transport.records import fields_of

LINKS = {
    name: link
    for name, link in (vars(orders) | vars(protocol) | vars(shared_protocol)).items()
    if inspect.isclass(link) and link.__bases__ == (codec.Direction,)
}
LINES = [json.loads(line) for line in Path(__file__).with_name("wire.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("link", "wire"), LINES, ids=lambda part: part if isinstance(part, str) else part[0])
def test_a_message_is_written_as_it_always_was(link: str, wire: list[Any]) -> None:
    message = codec.decoder(LINKS[link].messages()[wire[0]])(wire, [b""] * wire[-1])
    assert message.encoded()[0] == wire
    made = type(message)(**{field: getattr(message, field) for field in fields_of(type(message))})
    assert made.encoded()[0] == wire
    codec.check(made)


def test_every_kind_of_message_has_a_line() -> None:
    known = {(name, kind) for name, link in LINKS.items() for kind in link.messages()}
    assert {(link, wire[0]) for link, wire in LINES} == known

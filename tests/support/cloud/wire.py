"""The languages of AWS: requests as forms or JSON, answers as XML or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

__all__ = [
    "Answer",
    "Request",
    "edited",
    "error",
    "filters",
    "listed",
    "parse",
    "rendered",
    "reply",
    "tag_specifications",
    "xml",
]

_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


@dataclass(frozen=True)
class Request:
    """A request, taken apart."""

    service: str
    action: str
    region: str
    params: dict[str, str]

    @property
    def body(self) -> bytes:
        """The form again, with what was changed."""
        return urlencode(self.params).encode()


@dataclass(frozen=True)
class Answer:
    """An answer, before it is sent."""

    status: int
    body: bytes
    type: str = "text/xml;charset=UTF-8"

    @property
    def code(self) -> str:
        """ "ok", or the error's code."""
        if self.status < 300:
            return "ok"
        found = re.search(rb"<Code>([^<]+)</Code>|\"__type\": ?\"([^\"]+)\"", self.body)
        return (found[1] or found[2]).decode() if found else str(self.status)


def parse(environ: Mapping[str, Any], body: bytes) -> Request:
    """What a request asks for, of which service, where."""
    scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    region, service = (scope[1], scope[2]) if scope else ("us-east-1", "")
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        content: dict[str, Any] = json.loads(body or b"{}")
        params = {key: value if isinstance(value, str) else json.dumps(value) for key, value in content.items()}
        return Request(service, target.rpartition(".")[2], region, params)
    form = dict(parse_qsl(body.decode(), keep_blank_values=True))
    return Request(service, form.get("Action", ""), region, form)


def listed(params: Mapping[str, str], name: str) -> list[str]:
    """The values of Name.1, Name.2, ..."""
    found: list[str] = []
    while f"{name}.{len(found) + 1}" in params:
        found.append(params[f"{name}.{len(found) + 1}"])
    return found


def tag_specifications(params: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Kind of thing -> its tags, as a create call gives them."""
    found: dict[str, dict[str, str]] = {}
    for i in _numbers(params, "TagSpecification."):
        start = f"TagSpecification.{i}."
        tags = {
            params[f"{start}Tag.{j}.Key"]: params.get(f"{start}Tag.{j}.Value", "")
            for j in _numbers(params, f"{start}Tag.")
        }
        found[params.get(f"{start}ResourceType", "")] = tags
    return found


def filters(params: Mapping[str, str]) -> dict[str, list[str]]:
    """Name of a filter -> its values."""
    return {params[f"Filter.{i}.Name"]: listed(params, f"Filter.{i}.Value") for i in _numbers(params, "Filter.")}


def xml(action: str, content: str) -> Answer:
    """An answer of EC2."""
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    text = f'{head}<{action}Response xmlns="{_NAMESPACE}"><requestId>test</requestId>{content}</{action}Response>'
    return Answer(200, text.encode())


def reply(content: Any) -> Answer:
    """An answer in JSON."""
    return Answer(200, json.dumps(content).encode(), "application/x-amz-json-1.1")


def error(service: str, code: str, message: str, status: int = 400) -> Answer:
    """A refusal in the language of the service."""
    if service in ("ssm", "pricing", "servicequotas"):
        body = json.dumps({"__type": code, "message": message})
        return Answer(status, body.encode(), "application/x-amz-json-1.1")
    inner = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
    if service == "sts":
        return Answer(status, f"<ErrorResponse>{inner}<RequestId>test</RequestId></ErrorResponse>".encode())
    return Answer(status, f"<Response><Errors>{inner}</Errors><RequestID>test</RequestID></Response>".encode())


def edited(answer: Answer, list_name: str) -> tuple[ElementTree.Element, Iterator[tuple[Any, Any]]]:
    """An XML answer as a tree, and the items of one kind of list in it with the list that holds each."""
    root = ElementTree.fromstring(answer.body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    pairs = [(parent, item) for parent in root.iter(list_name) for item in list(parent)]
    return root, iter(pairs)


def rendered(root: ElementTree.Element) -> Answer:
    """A tree as an answer."""
    return Answer(200, ElementTree.tostring(root))


def _numbers(params: Mapping[str, str], prefix: str) -> list[int]:
    found = {
        int(key[len(prefix) :].split(".", 1)[0])
        for key in params
        if key.startswith(prefix) and key[len(prefix)].isdigit()
    }
    return sorted(found)

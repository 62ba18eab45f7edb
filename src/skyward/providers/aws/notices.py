"""Waits on a node for EC2's notice that the machine is to be taken away.

PUT /latest/api/token  ->  a token  ->  GET /latest/meta-data/spot/instance-action: 404 until there is notice
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple, cast
from urllib.parse import urlsplit

__all__ = ["remaining", "taken_at", "wait"]

_log = logging.getLogger("skyward.aws")
_TOKEN = "/latest/api/token"
_NOTICE = "/latest/meta-data/spot/instance-action"
_TTL = 21600
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_TIMEOUT = 2.0
_LONGEST = 60.0
# Where the service has answered before, its silence is short, and a notice is to be seen within 10 s.
_LONGEST_KNOWN = 5.0
# What a clock may be wrong by without our noticing: the service tells the time in whole seconds.
_AGREES = 2.0


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Token(NamedTuple):
    text: str
    renew_at: float


def wait(url: str = "http://169.254.169.254", poll: float = 2.0) -> float:
    """The seconds left when the notice comes. Never gives up while nothing answers."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port or 80
    token: _Token | None = None
    known, pause = False, poll
    while True:
        try:
            if token is None or time.monotonic() >= token.renew_at:
                token = _new_token(host, port)
            answer = _asked(host, port, "GET", _NOTICE, {"X-aws-ec2-metadata-token": token.text})
            if answer.status == 200:
                return remaining(taken_at(answer.body), answer.headers.get("date"), time.time())
            if answer.status == 401:
                token = None  # it has expired, or the service has restarted
            elif answer.status != 404:
                raise ValueError(f"it answered {answer.status}")
            known, pause = True, poll
        except (OSError, HTTPException, ValueError) as exc:
            _log.debug("the metadata service at %s is of no use now, asking again: %s", url, exc)
            pause = max(poll, min(2 * pause, _LONGEST_KNOWN if known else _LONGEST))
        time.sleep(pause)


def taken_at(body: bytes) -> float:
    try:
        notice: object = json.loads(body)
    except RecursionError:
        raise ValueError("this is not a notice: it is nested without end") from None
    at = cast("dict[str, object]", notice).get("time") if isinstance(notice, dict) else None
    if not isinstance(at, str):
        raise ValueError(f"this is not a notice: {body[:200]!r}")
    moment = datetime.fromisoformat(at)
    try:
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except OverflowError:
        raise ValueError(f"this is not a time: {at[:80]!r}") from None


def remaining(deadline: float, date: str | None, now: float) -> float:
    """By the Date of the answer where this machine's clock is wrong."""
    try:
        server_time = parsedate_to_datetime(date).timestamp() if date else now
    except ValueError:
        server_time = now
    return max(0.0, deadline - (now if abs(server_time - now) <= _AGREES else server_time))


def _new_token(host: str, port: int) -> _Token:
    asked_at = time.monotonic()
    answer = _asked(host, port, "PUT", _TOKEN, {_TTL_HEADER: str(_TTL)})
    text = answer.body.decode("ascii")
    if answer.status != 200 or not text or not text.isprintable():
        raise ValueError(f"it gave no token but {answer.status} {answer.body[:200]!r}")
    lasts = float(answer.headers.get(_TTL_HEADER.lower(), _TTL))
    return _Token(text, asked_at + 0.8 * lasts)


def _asked(host: str, port: int, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
    # A connection of its own: one that is kept, or that goes by the proxies of the environment, can only go wrong.
    connection = HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return _Answer(answer.status, named, answer.read(65536))
    finally:
        connection.close()

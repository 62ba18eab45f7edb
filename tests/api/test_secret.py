"""Secrets: a type that is shown nowhere, names that look like one, and *** in the place of their values (SEC-9)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import logging
import pickle
import pprint
import secrets
import traceback
import weakref
from collections import deque
from typing import Any

import pytest

import skyward as sky
from skyward.api import secret as secret_module
from skyward.api.secret import hide, hide_beginning, hide_bytes, looks_secret, revealed
from skyward.client.output import Lines
from skyward.errors import InvalidArgument
from skyward.transport import exceptions


@pytest.fixture(autouse=True)
def no_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these tests are hidden in no other."""
    monkeypatch.setattr(secret_module, "_values", weakref.WeakValueDictionary[str, secret_module.Hidden]())
    monkeypatch.setattr(secret_module, "_recent", deque[secret_module.Hidden](maxlen=256))
    monkeypatch.setattr(secret_module, "_forms_now", ())


def canary() -> str:
    return f"canary-{secrets.token_hex(12)}"


@dataclasses.dataclass
class Holder:
    name: str
    token: sky.Secret


def test_a_secret_is_shown_by_nothing_but_reveal(caplog: pytest.LogCaptureFixture) -> None:
    """SEC-9."""
    text = canary()
    secret = sky.Secret(text)
    assert secret.reveal() == text
    logging.getLogger("x").warning("%s %r", secret, secret)
    holder = Holder("me", secret)
    shown = [
        repr(secret), str(secret), f"{secret}", f"{secret:>40}", f"{secret!r}",
        repr([secret]), repr({"a": secret}), repr(holder), pprint.pformat(holder), repr(dataclasses.asdict(holder)),
        ascii(secret), caplog.text, str(vars(holder)),
    ]  # fmt: skip
    try:
        raise ValueError(secret)
    except ValueError as exc:
        shown.append("".join(traceback.TracebackException.from_exception(exc, capture_locals=True).format()))
    assert [line for line in shown if text in line.replace(f"text = '{text}'", "")] == []
    assert str(secret) == "***"


def test_a_secret_is_no_string_and_json_refuses_it() -> None:
    """SEC-9."""
    secret: Any = sky.Secret(canary())
    with pytest.raises(TypeError, match=r"reveal\(\)"):
        _ = "Bearer " + secret
    with pytest.raises(TypeError, match=r"reveal\(\)"):
        _ = secret + "x"
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps({"token": secret})
    for use in (len, iter, bytes, int):
        with pytest.raises(TypeError):
            use(secret)
    with pytest.raises(AttributeError):
        _ = secret.__dict__


def test_a_secret_travels_as_a_secret_and_copies_are_equal() -> None:
    secret = sky.Secret(canary())
    for other in (pickle.loads(pickle.dumps(secret)), copy.copy(secret), copy.deepcopy(secret)):
        assert type(other) is sky.Secret
        assert other == secret
        assert hash(other) == hash(secret)
        assert other.reveal() == secret.reveal()
    assert secret != secret.reveal()
    assert secret != sky.Secret(canary())


def test_from_env_takes_the_value_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    text = canary()
    monkeypatch.setenv("HF_TOKEN", text)
    secret = sky.Secret.from_env("HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    assert secret.reveal() == text
    with pytest.raises(InvalidArgument, match=r"HF_TOKEN is not set.*export HF_TOKEN="):
        sky.Secret.from_env("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", " ")
    with pytest.raises(InvalidArgument, match="HF_TOKEN is empty"):
        sky.Secret.from_env("HF_TOKEN")


@pytest.mark.parametrize("wrong", ["", " \n", None, b"bytes", 3])
def test_what_holds_no_secret_is_refused_without_showing_it(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="Secret"):
        sky.Secret(wrong)


def test_images_and_indexes_take_secrets_and_show_none() -> None:
    """SEC-9, SEC-28."""
    text, other = canary(), "p@ss:w/ord " + canary()
    image = sky.Image(
        pip_indexes=[sky.PipIndex("https://example.org/simple", ["x"], username="me", password=sky.Secret(other))],
        env={"MODE": sky.Secret(text), "PLAIN": "fast"},
        shell_vars={"WHERE": sky.Secret(text)},
    )
    for shown in (repr(image), repr(image.env), repr(image.pip_indexes), image.content_hash, image.pip_indexes[0].url):
        assert text not in shown
        assert "ord " not in shown
    assert "'MODE': '***'" in repr(image)
    assert "fast" in repr(image)
    assert revealed(image.env) == {"MODE": text, "PLAIN": "fast"}
    assert image.pip_indexes[0].address.startswith("https://me:p%40ss%3Aw%2Ford%20canary-")
    more = image.adding(env={"B": sky.Secret(text)})
    assert more.env["B"] == sky.Secret(text)
    # a new token is no other image: nothing is installed again for it
    assert (
        image.content_hash == dataclasses.replace(image, env={**image.env, "MODE": sky.Secret(canary())}).content_hash
    )
    with pytest.raises(InvalidArgument, match="NUL"):
        sky.Image(env={"A": sky.Secret("a\0b")})


@pytest.mark.parametrize(
    "arguments",
    [
        {"username": "me"},
        {"username": "me", "password": ""},
        {"password": 3},
    ],
)
def test_an_index_with_half_a_login_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="password"):
        sky.PipIndex("https://example.org/simple", ["x"], **arguments)
    with pytest.raises(InvalidArgument, match="a login already"):
        sky.PipIndex("https://me:x@example.org/simple", ["x"], password=sky.Secret("abcdef"))


def test_a_password_given_as_text_is_a_secret_from_then_on() -> None:
    text = canary()
    index = sky.PipIndex("https://example.org/simple", ["x"], password=text)
    assert index.password == sky.Secret(text)
    assert text not in repr(index)
    assert index.address == f"https://__token__:{text}@example.org/simple"


SECRET_NAMES = """
    TOKEN HF_TOKEN hf_token TF_token CONDA_AUTH AUTH PASSWD MYSQL_PWD GH_PAT CREDENTIALS CREDENTIAL DSN SENTRY_DSN
    PGPASSWORD apiKey API_KEY api-key MY_SECRET_2 KEY2 KEYS AWS_SECRET_ACCESS_KEY SLACK_WEBHOOK_URL GITHUBTOKEN hfToken
    AZURE_STORAGE_CONNECTION_STRING GOOGLE_APPLICATION_CREDENTIALS PASSWORD DB_PASS HFToken Passphrase XLA_AUTH_TOKEN
""".split()
OTHER_NAMES = """
    KEYBOARD PATH MONKEY PWD OLDPWD TOKENIZERS_PARALLELISM AUTHOR GIT_AUTHOR_NAME PATTERN HOME XAUTHORITY BYPASS DSNAME
    CUDA_VISIBLE_DEVICES PYTHONPATH SECRETARY COMPASS_X PATCH keyboard MaxKeyboard PIN_MEMORY TF_CPP_MIN_LOG_LEVEL
""".split()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_that_look_like_secrets_are_known(name: str) -> None:
    """SEC-9, SEC-13: case does not matter; their values are neither shown nor passed on."""
    from skyward.setup.local_shell import inherited

    assert looks_secret(name)
    assert "fast" not in repr(sky.Image(env={name.replace("-", "_"): "fast"}))
    assert inherited({f"TF_{name}": "x", "CONDA_PREFIX": "y"}) == {"CONDA_PREFIX": "y"}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_only_contain_such_words_are_not(name: str) -> None:
    assert not looks_secret(name)
    assert "fast" in repr(sky.Image(env={name: "fast"}, allow_env=[name]))


def test_values_are_hidden_in_text_however_they_are_written() -> None:
    """SEC-9."""
    text = f'it\'s "{canary()}" \\ /ü'
    secret = sky.Secret(text)
    for form in (text, repr(text), json.dumps(text), json.dumps(text, ensure_ascii=False)):
        assert "canary" not in hide(f"before {form} after")
        assert hide(f"before {form} after").startswith("before ")
    assert b"canary" not in hide_bytes(b"x " + text.encode() + b" y")
    assert secret.reveal() == text


def test_each_line_of_a_key_is_hidden() -> None:
    """SEC-9."""
    lines = [canary() for _ in range(3)]
    key = sky.Secret("\n".join(["-----BEGIN KEY-----", *lines, ""]))
    assert hide(f"> {lines[1]} <") == "> *** <"
    assert "canary" not in hide(key.reveal())


def test_a_dropped_secret_is_hidden_still() -> None:
    """The body that was given it may print it when nothing here refers to it any more."""
    text = canary()
    sky.Secret(text)
    gc.collect()
    assert hide(text) == "***"


def test_dropped_secrets_are_forgotten_in_the_end_and_those_in_use_are_not() -> None:
    kept, dropped = sky.Secret(canary()), canary()
    sky.Secret(dropped)
    for _ in range(300):
        sky.Secret(canary())
    gc.collect()
    sky.Secret(canary())
    assert hide(kept.reveal()) == "***"
    assert hide(dropped) == dropped


def test_short_values_do_not_tear_texts_apart() -> None:
    sky.Secret("abc")
    assert hide("abcdef") == "abcdef"
    sky.Secret("test")
    assert hide("pytest runs test_it, testing, tests and contest") == "pytest runs test_it, testing, tests and contest"
    assert hide_bytes("attest für".encode()) == "attest für".encode()
    assert hide_beginning("the conte") == "the conte"


def test_short_values_are_hidden_as_whole_words() -> None:
    """SEC-9."""
    sky.Secret("hunter2")
    shown = [
        "hunter2",
        "pw=hunter2;",
        "'hunter2'",
        "me:hunter2@host",
        "a hunter2",
        repr("line\nhunter2"),
        "%3Ahunter2",
        "\x1b[1;31mhunter2\x1b[0m",
    ]
    assert [text for text in map(hide, shown) if "hunter2" in text or "***" not in text] == []
    assert hide("hunter2hunter2 hunter2") == "hunter2hunter2 ***"
    assert hide_bytes(b"\xff hunter2\xc3") == b"\xff ***\xc3"
    assert hide_beginning("my hunte") == "my ***"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r", ""])
def test_output_is_hidden_across_the_borders_of_chunks(size: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-9: also in a progress bar, which is shown before its line is complete."""
    monkeypatch.setattr("skyward.client.output._PROGRESS_EVERY", 0.0)
    secret = sky.Secret(canary())
    data = f"a {secret.reveal()} b{end}\rnext {secret.reveal()}{end}".encode()
    lines, found = Lines(), list[str]()
    for start in range(0, len(data), size):
        found += [text for text, _ in lines.feed(data[start : start + size])]
    found += [text for text, _ in lines.rest()]
    assert [text for text in found if "cana" in text] == []
    assert any("***" in text for text in found)


def test_output_is_hidden_across_the_end_of_an_overlong_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.client.output._LONGEST", 100)
    secret = sky.Secret(canary())
    data = ("x" * 90 + "ü" * 5 + secret.reveal() + "y" * 150 + secret.reveal()).encode()
    lines, found = Lines(), list[str]()
    for start in range(0, len(data), 9):
        found += [text for text, _ in lines.feed(data[start : start + 9])]
    found += [text for text, _ in lines.rest()]
    whole = "".join(found)
    assert whole == "x" * 90 + "ü" * 5 + "***" + "y" * 150 + "***"


def test_the_beginning_of_a_secret_at_the_end_of_a_text_is_hidden() -> None:
    secret = sky.Secret("canary-0123456789abcdef")
    assert hide_beginning("token canary-0123") == "token ***"
    assert hide_beginning("token canary-0123456789abcdef") == "token ***"
    assert hide_beginning("token can") == "token can"
    assert secret


def test_exceptions_from_nodes_show_no_secret() -> None:
    """SEC-9, SEC-15: neither message, chain, notes nor attributes; type and other values stay."""
    secret = sky.Secret(canary())

    class Refused(Exception):
        def __init__(self, token: str, code: int) -> None:
            super().__init__(token, code)
            self.token, self.code = token, code

    def fail() -> None:
        try:
            raise KeyError(f"no {secret.reveal()}")
        except KeyError as exc:
            error = Refused(secret.reveal(), 401)
            error.add_note(f"tried {secret.reveal()}")
            raise error from exc

    try:
        fail()
    except Refused as exc:
        described, data = exceptions.capture(exc)
    shown = exceptions.packed(described, data, "raised on node 0").rebuilt()
    assert type(shown).__name__ == "Refused"
    assert (shown.token, shown.code) == ("***", 401)  # type: ignore[attr-defined]
    out = io.StringIO()
    traceback.print_exception(shown, file=out)
    assert "raised on node 0" in out.getvalue()
    assert "canary" not in out.getvalue()
    assert "canary" not in str(exceptions.rebuild(described, b""))


def test_groups_of_exceptions_show_no_secret() -> None:
    secret = sky.Secret(canary())
    described, data = exceptions.capture(ExceptionGroup("several", [ValueError(secret.reveal()), KeyError("a")]))
    shown: Any = exceptions.rebuild(described, data)
    assert [str(error) for error in shown.exceptions] == ["***", "'a'"]


def test_nothing_is_searched_where_there_is_no_secret() -> None:
    text = "x" * 1000
    assert hide(text) is text
    assert hide_beginning(text) is text
    data = b"y" * 1000
    assert hide_bytes(data) is data
    assert not secret_module.any_hidden()


def test_secrets_that_threads_make_at_once_are_all_hidden() -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = [canary() for _ in range(200)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(sky.Secret, texts))
    assert [hide(secret.reveal()) for secret in made] == ["***"] * len(texts)

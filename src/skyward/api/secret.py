"""Values that must not be shown: the type for them, and which variables' names say that they hold one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from skyward.api.base_errors import InvalidArgument
from skyward.api.masking import MASK, hidden

__all__ = ["Secret", "looks_secret", "looks_secret_file", "revealed", "without_secrets"]


class Secret:
    """A text that is shown nowhere, such as a token or a password; `reveal()` returns it.

    Accepted where values go to nodes: `Image(env=, shell_vars=)`, `PipIndex(password=)`, arguments of plugins and of
    calls. A call gets it as a Secret. Its repr, str and format are ***, and *** stands in its place in the output and
    the errors that come from nodes. It can be pickled, which is how it travels over the pool's encrypted connections:
    a pickle that you write to a file holds the value. JSON refuses it.
    """

    __slots__ = ("__weakref__", "_hidden")

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(f"a Secret holds text, and was given {type(value).__name__}. Write sky.Secret(text).")
        if not value.strip():
            raise InvalidArgument("a Secret was given an empty text; there is nothing to keep. Look where it is from.")
        self._hidden = hidden(value)

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """The value of the variable `name` of this program's environment; an error if it is not set or empty."""
        value = os.environ.get(name)
        if value is None or not value.strip():
            state = "is not set" if value is None else "is empty"
            raise InvalidArgument(
                f"the variable {name} {state} in the environment of this program, so there is no secret in it. "
                f"Set it before you start the program: export {name}=..."
            )
        return cls(value)

    def reveal(self) -> str:
        """The text itself. A plain string can be shown by mistake: give it only to what needs it."""
        return self._hidden.value

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        return self.reveal() == other.reveal() if isinstance(other, Secret) else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self.reveal()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reveal(),)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __add__(self, other: object) -> NoReturn:
        raise TypeError("a Secret is no string, so that it is not shown by mistake. Use its text: secret.reveal().")

    __radd__ = __add__


def revealed(values: Mapping[str, str | Secret]) -> dict[str, str]:
    """Variables as a program gets them."""
    return {name: value.reveal() if isinstance(value, Secret) else value for name, value in values.items()}


def without_secrets(values: Mapping[str, str | Secret]) -> dict[str, str]:
    """The variables that are no secrets, and do not look like ones."""
    return {name: value for name, value in values.items() if isinstance(value, str) and not looks_secret(name)}


# Whole words of a name, and what a word may end with. TOKENIZERS, KEYBOARD, PATH and AUTHOR are none of these.
_WORDS = frozenset(
    """
    KEY KEYS AUTH AUTHORIZATION PASS PWD PAT DSN CRED CREDS SAS JWT BEARER COOKIE WEBHOOK
    """.split()
)
_ENDINGS = tuple(
    """
    TOKEN TOKENS SECRET SECRETS PASSWORD PASSWORDS PASSWD PASSPHRASE PASSCODE CREDENTIAL CREDENTIALS
    APIKEY APIKEYS ACCESSKEY SECRETKEY PRIVATEKEY AUTHKEY CONNECTIONSTRING CONNSTR
    """.split()
)
_FILE_WORDS = tuple("SECRET SECRETS PASSWORD PASSWORDS PASSWD PASSPHRASE CREDENTIAL CREDENTIALS".split())
_FILE_ENDINGS = ("TOKEN", "APIKEY", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "PRIVATEKEY")
_DATA = frozenset("txt json yaml yml toml ini cfg conf cnf properties xml csv dat bin enc gpg asc db sqlite".split())
_DIRECTORIES = frozenset({"PWD", "OLDPWD"})  # the shell's own


@lru_cache(4096)
def looks_secret(name: str) -> bool:
    """Whether a name, of a variable or a file, says that a secret is behind it; case does not matter."""
    if name in _DIRECTORIES:
        return False
    said = _words(name)
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in said) or "CONNECTION_STRING" in "_".join(said)


def looks_secret_file(name: str) -> bool:
    """Whether a file's name says that a secret is in it; programs and texts about secrets are not meant.

    `tokens` and `key` are words of machine learning, too: only a file that is named after one token or key counts.
    """
    stem, dot, suffix = name.rpartition(".")
    if dot and stem and suffix.lower() not in _DATA:
        return False
    said = _words(stem or name)
    last = "_".join(said[-2:])
    return any(word.endswith(_FILE_WORDS) for word in said) or last.endswith(_FILE_ENDINGS)


def _words(name: str) -> list[str]:
    return [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", re.sub(r"[0-9]+", " ", name))]

"""Values that must not be shown: their type, and which variables' names suggest one."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from skyward.errors import InvalidArgument

__all__ = [
    "MASK",
    "Hidden",
    "Secret",
    "any_hidden",
    "hidden",
    "hide",
    "hide_beginning",
    "hide_bytes",
    "holds_secret",
    "installer_environment",
    "longest",
    "looks_secret",
    "looks_secret_file",
    "revealed",
    "slurm_environment",
    "ssh_environment",
    "without_secrets",
]


class Secret:
    """A text that is shown nowhere, such as a token or a password; `reveal()` returns it.

    Accepted in `Image(env=, shell_vars=)`, `PipIndex(password=)`, arguments of plugins and of calls, which get a
    Secret. Its repr, str and format are ***, also in output and errors of nodes. It can be pickled: a pickle in a file
    holds the value. JSON refuses it.
    """

    __slots__ = ("__weakref__", "_hidden")

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(f"a Secret holds text, and was given {type(value).__name__}. Write sky.Secret(text).")
        if not value.strip():
            raise InvalidArgument(
                "a Secret was given an empty text; there is nothing to keep. Check where it comes from."
            )
        self._hidden = hidden(value)

    @classmethod
    def from_env(cls, name: str) -> Secret:
        """From this program's variable `name`; an error if that is not set or empty."""
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
        raise TypeError("a Secret is not a string, so that it is not shown by mistake. Use its text: secret.reveal().")

    __radd__ = __add__


def revealed(values: Mapping[str, str | Secret]) -> dict[str, str]:
    return {name: value.reveal() if isinstance(value, Secret) else value for name, value in values.items()}


def without_secrets(values: Mapping[str, str | Secret]) -> dict[str, str]:
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
    """Case does not matter."""
    if name in _DIRECTORIES:
        return False
    said = _words(name)
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in said) or "CONNECTION_STRING" in "_".join(said)


def looks_secret_file(name: str) -> bool:
    """`tokens` and `key` are words of machine learning, too: only one token or key counts."""
    stem, dot, suffix = name.rpartition(".")
    if dot and stem and suffix.lower() not in _DATA:
        return False
    said = _words(stem or name)
    last = "_".join(said[-2:])
    return any(word.endswith(_FILE_WORDS) for word in said) or last.endswith(_FILE_ENDINGS)


def _words(name: str) -> list[str]:
    return [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", re.sub(r"[0-9]+", " ", name))]


# Hides the values of secrets in text: which values there are in this process, and where they stand in a text.
#
# Every `Secret` that is alive is known here, and the last 256 that were made. Nothing is done where there is none.


MASK = "***"
_SHORTEST = 4
"""Shorter texts occur in too many others to be searched for."""
_SHORTEST_LINE = 8
_SHORTEST_ANYWHERE = 8
"""Shorter texts are hidden only as whole words: `test` not in `testing`."""
_ESCAPE = re.compile(r"(\\[abfnrtv0]|%[0-9A-Fa-f]{2}|\x1b\[[0-9;]{0,16}m)\Z")
"""Ends in a letter or a figure, but is no part of the next word: a line end in quotes, a space, a colour."""
_PICKLED = b"skyward.api.secret"
_CHUNK = 16 << 20
_OVERLAP = 1 << 16  # a secret may lie across the end of a chunk
_RECENT = 256


class Hidden:
    """Shared by all secrets with the same value."""

    __slots__ = ("__weakref__", "forms", "value")

    def __init__(self, value: str) -> None:
        self.value = value
        self.forms = _forms(value)


_values: weakref.WeakValueDictionary[str, Hidden] = weakref.WeakValueDictionary()
# A secret may be dropped here while a body that was given it still runs, and prints it.
_recent: deque[Hidden] = deque(maxlen=_RECENT)
_forms_now: tuple[str, ...] = ()
_lock = threading.Lock()


def hidden(value: str) -> Hidden:
    global _forms_now
    with _lock:
        known = _values.get(value)
        if known is None:
            known = _values[value] = Hidden(value)
            _recent.append(known)
            alive = [found for ref in _values.valuerefs() if (found := ref()) is not None]
            # The longest first: one value may hold another.
            _forms_now = tuple(sorted({form for each in alive for form in each.forms}, key=len, reverse=True))
        return known


def any_hidden() -> bool:
    return bool(_forms_now)


def hide(text: str) -> str:
    for form in _forms_now:
        if form in text:
            short = len(form) < _SHORTEST_ANYWHERE
            text = re.sub(re.escape(form), _hidden_word, text) if short else text.replace(form, MASK)
    return text


def hide_beginning(text: str) -> str:
    """As `hide`, for a text that continues: *** also replaces the beginning of a value at its end."""
    text = hide(text)
    for form in _forms_now:
        for length in range(min(len(form) - 1, len(text)), _SHORTEST - 1, -1):
            if text.endswith(form[:length]):
                short = len(form) < _SHORTEST_ANYWHERE
                if not (short and _is_in_word(text, len(text) - length, len(text))):
                    return text[:-length] + MASK
    return text


def hide_bytes(data: bytes) -> bytes:
    if any(form.encode("utf-8", "surrogateescape") in data for form in _forms_now):
        return hide(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return data


def holds_secret(buffers: Iterable[bytes | bytearray | memoryview]) -> bool:
    """Whether one unpickles to a Secret, or has the value of a known one."""
    for buffer in buffers:
        for at in range(0, len(buffer), _CHUNK):
            content = bytes(buffer[at : at + _CHUNK + _OVERLAP])
            if _PICKLED in content or (any_hidden() and hide_bytes(content) is not content):
                return True
    return False


def longest() -> int:
    return max((len(form.encode("utf-8", "surrogateescape")) for form in _forms_now), default=0)


def _hidden_word(found: re.Match[str]) -> str:
    return found.group() if _is_in_word(found.string, *found.span()) else MASK


def _is_in_word(text: str, start: int, end: int) -> bool:
    before, first, last, after = text[start - 1 : start], text[start], text[end - 1], text[end : end + 1]
    begun = _continues(before, first) and _ESCAPE.search(text, max(0, start - 20), start) is None
    return begun or _continues(last, after)


def _continues(one: str, other: str) -> bool:
    return all(char.isalnum() or char == "_" for char in (one, other))


def _forms(value: str) -> tuple[str, ...]:
    import json
    from urllib.parse import quote

    plain = {
        value,
        value.strip(),
        *(line for line in map(str.strip, value.splitlines()) if len(line) >= _SHORTEST_LINE),
    }
    forms = set(plain)
    for text in plain:
        forms |= {repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        forms |= {quote(text, safe="", errors="replace"), quote(text, errors="replace")}
    return tuple(form for form in forms if len(form) >= _SHORTEST)


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_in_child)


_NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM PWD TMPDIR TMP TEMP NO_COLOR
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY FTP_PROXY RSYNC_PROXY
    SSL_CERT_FILE SSL_CERT_DIR SSL_CLIENT_CERT REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NETRC
    LD_LIBRARY_PATH DYLD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH PKG_CONFIG_PATH
    CC CXX CPP AR LD AS NM RANLIB STRIP FC CFLAGS CXXFLAGS CPPFLAGS LDFLAGS ARCHFLAGS MAKEFLAGS MAX_JOBS
    MACOSX_DEPLOYMENT_TARGET SDKROOT DEVELOPER_DIR RUSTFLAGS CARGO_HOME RUSTUP_HOME SOURCE_DATE_EPOCH
    TORCH_CUDA_ARCH_LIST FORCE_CUDA
    """.split()
)
_PREFIXES = ("LC_", "XDG_", "UV_", "PIP_", "PYENV_", "ASDF_", "CMAKE_", "CUDA_", "ROCM_", "HIP_", "SKYWARD_")
# What Slurm's commands, the filters of a site and the files that set up a login shell are told.
_SLURM = ("LC_", "XDG_", "SLURM_", "SBATCH_", "SALLOC_", "MUNGE_", "KRB5", "LMOD_", "MODULE", "LOADEDMODULES")
_SLURM_LOGIN = "SLURM_JWT"
# What git and the ssh that it starts are told; only for packages that come out of a repository.
_GIT = ("GIT_", "SSH_")
_INDEX_LOGIN = re.compile(r"UV_INDEX_\w+_(?:USERNAME|PASSWORD)")
_PUBLISHING = re.compile(r"UV_PUBLISH_")
_AGENT = "SSH_AUTH_SOCK"  # a socket, not a secret: what it is for is done by ssh itself
# A user name and a password in an address, as in postgres://me:password@host/.
_LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")


def installer_environment(environ: Mapping[str, str], *, repositories: bool = False) -> dict[str, str]:
    """For programs that fetch, build and install packages: whatever is built runs with it. `repositories` adds what git
    needs to log in.
    """
    prefixes = (*_PREFIXES, *_GIT) if repositories else _PREFIXES

    def is_passed(name: str) -> bool:
        if _INDEX_LOGIN.fullmatch(name):
            return True
        known = name.upper() in _NAMES or name.startswith(prefixes)
        # The values of git's settings may hold logins, which is what they are for.
        secret = not name.startswith("GIT_CONFIG_") and _is_secret(name)
        return known and not secret and not _PUBLISHING.match(name)

    return {name: value for name, value in environ.items() if is_passed(name)}


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands need to find the cluster, and its login."""
    return {
        name: value
        for name, value in environ.items()
        if name == _SLURM_LOGIN
        or ((name.upper() in _NAMES or name.startswith(_SLURM)) and not _is_secret(name) and not _LOGIN.search(value))
    }


def ssh_environment(environ: Mapping[str, str], logins: Collection[str] = ()) -> dict[str, str]:
    """All but `logins` and what looks like a secret: ssh's settings may start any program."""
    return {
        name: value
        for name, value in environ.items()
        if name in logins or (not _is_secret(name) and (name.upper() in _NAMES or not _LOGIN.search(value)))
    }


def _is_secret(name: str) -> bool:
    return name != _AGENT and looks_secret(name)

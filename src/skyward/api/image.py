"""What a node must have before user code runs there: a frozen value, checked when made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, urlsplit, urlunsplit

from skyward.api.secret import MASK, Secret, hide, looks_secret
from skyward.api.usage_errors import FOR_IMAGES, corrects
from skyward.errors import InvalidArgument

__all__ = ["Image", "PipIndex", "Variables", "check_number", "check_one_of", "check_texts", "mask", "requirement_path"]


_OLDEST = (3, 11)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A password may hold an @: the last one before the path counts, as for every program that reads addresses.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_URL = re.compile(r"(?:(?:git|hg|svn|bzr)\+)?(?:https?|ssh|file)://\S+")
# Debian has no capital letters and underscores in names; what dnf installs may.
_SYSTEM_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]+(?::[a-z0-9-]+)?(?:=[A-Za-z0-9.+:~-]+)?")
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_REQUIREMENTS = '"name", "name>=1.2", "name[extra]", a URL, or a path that begins with "./"'
# What these hold decides which programs and libraries run, on every process of the node.
_LOADER = frozenset({"LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONHOME", "PYTHONPATH"})


def mask(text: str) -> str:
    """`text` with logins in URLs and the values of secrets replaced by ***."""
    return _CREDENTIALS.sub(MASK, hide(text))


def requirement_path(entry: str) -> str | None:
    if "://" in entry:
        return None
    return entry if entry.startswith((".", "/", "~")) or entry.endswith(_ARCHIVES) else None


def check_number(name: str, value: object, *, whole: bool = True) -> None:
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not cast("float", value) > 0 or value == float("inf"):
        kind = "a whole number of at least 1" if whole else "a number above 0"
        number = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|m|min|h|d|kb|mb|gb|g)?\s*", str(value).lower())
        instead = ""
        if isinstance(value, str) and number:
            units = {"m": 60, "min": 60, "h": 3600, "d": 86400}
            if name.endswith("_bytes"):
                units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "g": 10**9}
            scale = units.get(number[2] or "", 1)
            unit = ", in bytes" if name.endswith("_bytes") else ", in seconds" * (scale > 1)
            instead = f" Write {name}={float(number[1]) * scale:.12g}, without quotes{unit}."
        elif isinstance(value, float) and whole and value.is_integer() and value > 0:
            instead = f" Write {name}={value:.0f}."
        raise InvalidArgument(f"{name}={value!r}: it must be {kind}.{instead}")
    if cast("float", value) >= 1 << 63:
        raise InvalidArgument(f"{name} is too large: give a number below 2**63.")


def check_one_of(name: str, value: object, options: Sequence[str]) -> None:
    if value not in options:
        raise InvalidArgument(f"{name}={value!r} is not known; {name} is one of: {', '.join(options)}.")


def check_texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        parts = re.split(r"[,\s]+", value.strip()) if "@" not in value else [value]
        raise InvalidArgument(f"{name} is one string; expected a list. Write {name}={list(map(mask, parts))!r}.")
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument(
            f"{name} has type {type(value).__name__}; expected a list. Give {name} a list of strings."
        )
    for entry in cast("Iterable[object]", value):
        if not isinstance(entry, str) or not entry.strip() or not entry.isprintable():
            raise InvalidArgument(
                f"{name} holds {mask(repr(entry))}, which is not a line of text. Give {name} such strings."
            )
    return tuple(cast("Iterable[str]", value))


def check_names(field: str, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise InvalidArgument(
                f"{field} holds {name!r}, which is not the name of a package. "
                "Give the bare name here, and versions and extras in Image(pip=...)."
            )
    return tuple(re.sub(r"[-_.]+", "-", name).lower() for name in names)


def _check_requirement(entry: str) -> None:
    if entry.lstrip().startswith("-"):
        raise InvalidArgument(
            f"pip holds {mask(entry)!r}, an option of pip; entries are packages. "
            "Other indexes go into pip_indexes=[sky.PipIndex(url, packages)]; "
            "read a requirements file yourself."
        )
    if requirement_path(entry) or _URL.fullmatch(entry):
        return
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(entry)
    except InvalidRequirement as exc:
        reason = mask(str(exc).splitlines()[0])
        one = re.fullmatch(r"([\w.-]+(?:\[[^\]]*\])?) *=(?!=) *([^=]+)", entry)
        raise InvalidArgument(
            f"pip holds {mask(entry)!r}, which is not a valid requirement ({reason}). "
            + (f'Write "{one[1]}=={one[2]}".' if one else f"Write {_REQUIREMENTS}.")
        ) from None


def _check_python(python: object) -> None:
    found = re.fullmatch(r"(\d+)\.(\d+)", python) if isinstance(python, str) else None
    if python == "auto" or (found and (int(found[1]), int(found[2])) >= _OLDEST):
        return
    raise InvalidArgument(
        f'python={python!r} cannot be used; it is "auto" (the version in use here) or major.minor as a string, '
        f'"{_OLDEST[0]}.{_OLDEST[1]}" or newer. Leave it out, or write python="3.12".'
    )


def _checked_lock(lock: object) -> str | None:
    if lock is None:
        return None
    text = os.fspath(lock) if isinstance(lock, (str, os.PathLike)) else lock  # pyright: ignore[reportUnknownVariableType] - callers may be untyped
    if isinstance(text, str) and re.fullmatch(r"(?:.*/)?(?:uv\.lock|pylock(?:\.[^./]+)?\.toml|[^/]+\.txt)", text):
        return text
    raise InvalidArgument(
        f"lock={lock!r} is not the path of a lock, which is called pylock.toml or pylock.NAME.toml, uv.lock, or, with "
        'hashes, requirements.txt or another name that ends in .txt. Write lock="pylock.toml".'
    )


def _check_include(entry: str) -> None:
    if entry.startswith(("/", "~")) or ".." in re.split(r"[/\\]", entry):
        raise InvalidArgument(
            f"includes holds {entry!r}, which leaves the project; what is sent must be inside it. "
            "Give paths relative to the directory in which you start the script."
        )


class Variables(Mapping[str, "str | Secret"]):
    """Immutable; the repr hides secrets and what looks like them."""

    def __init__(self, values: Mapping[str, str | Secret] | None = None, field: str = "env") -> None:
        if values is not None and not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                f'{field} has type {type(values).__name__}, not a dictionary. Write {field}={{"NAME": "value"}}.'
            )
        self._values = dict(values or {})
        for name, value in self._values.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance] - as above
                raise InvalidArgument(
                    f"{field} holds the name {name!r}; a variable's name has letters, digits and _ only, "
                    "and no digit first. Rename it."
                )
            text: object = value.reveal() if isinstance(value, Secret) else value
            if not isinstance(text, str) or "\0" in text:
                raise InvalidArgument(
                    f"{field}[{name!r}] is not text that a variable can hold (type {type(value).__name__}). "
                    'Give a string without NUL characters, e.g. "1" for 1, or a sky.Secret.'
                )

    def __getitem__(self, name: str) -> str | Secret:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr({name: _shown(name, value) for name, value in self.items()})


def _shown(name: str, value: str | Secret) -> str:
    return MASK if isinstance(value, Secret) or looks_secret(name) else mask(value)


@dataclass(frozen=True, repr=False)
class PipIndex:
    """A package index from which the named packages are taken, and no others.

    Args:
        url: its address, as pip takes it: "https://pypi.example.org/simple".
        packages: the names of all packages that come from there.
        username: for an index with a login. Default: "__token__", which most want beside a token.
        password: the password or token, as `sky.Secret.from_env("INDEX_TOKEN")`. Default: none, no login.
    """

    url: str
    packages: Sequence[str]
    username: str | None = None
    password: Secret | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not re.fullmatch(r"(?:https?|file)://\S+", self.url):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                f"url={mask(repr(self.url))} is not the address of a package index. It begins with https:// or file://."
            )
        packages = check_names(f"packages of index {mask(self.url)}", check_texts("packages", self.packages))
        if not packages:
            raise InvalidArgument(
                f"index {mask(self.url)} names no packages, so nothing would come from it. "
                'Write PipIndex(url, packages=["name"]).'
            )
        object.__setattr__(self, "packages", packages)
        self._check_login()

    @property
    def address(self) -> str:
        """The URL with its login, if any: a secret."""
        if self.password is None:
            return self.url
        secret = self.password.reveal() if isinstance(self.password, Secret) else self.password
        parts = urlsplit(self.url)
        login = f"{quote(self.username or '__token__', safe='')}:{quote(secret, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))

    def _check_login(self) -> None:
        password: object = self.password
        if password is None and self.username is None:
            return
        if password is None or not isinstance(password, (str, Secret)) or not password:
            raise InvalidArgument(
                f"index {mask(self.url)} has a username, but a password of type {type(password).__name__}. "
                'Write PipIndex(url, packages, username="me", password=sky.Secret.from_env("INDEX_PASSWORD")).'
            )
        if "@" in urlsplit(self.url).netloc or not self.url.startswith("http"):
            raise InvalidArgument(
                f"index {mask(self.url)} cannot have a password beside its URL: the URL has a login already, or is a "
                "file. Leave the login out of the URL."
            )
        if isinstance(password, str):  # from now on it is one: shown nowhere
            object.__setattr__(self, "password", Secret(password))

    def __repr__(self) -> str:
        login = f", username={self.username!r}, password={MASK!r}" if self.password is not None else ""
        return f"PipIndex(url={mask(self.url)!r}, packages={self.packages!r}{login})"


@corrects(FOR_IMAGES)
@dataclass(frozen=True, repr=False)
class Image:
    """What a node has: Python, packages, variables and files.

    Args:
        python: "auto", your own version, or another one as "3.12". Default: "auto".
        pip: packages: "numpy", "torch>=2.5", "./mylib", "name @ git+https://...". Default: none.
        pip_indexes: other indexes, each with the packages that come from there, as `[sky.PipIndex(url, [...])]`. Where
            two name the same package, the first one has it. Default: none.
        apt: system packages, installed with apt or dnf where they are missing; needs root there. Default: none.
        env: variables for user code, by name; texts, or a `sky.Secret`, which is shown nowhere. Default: none.
        shell_vars: the same, only while the node is set up. Default: none.
        includes: files and folders for the nodes, relative to where you start the program. Default: none.
        excludes: patterns of files in them that are left out, such as "*.csv". Default: none.
        bootstrap_timeout: seconds for setting a node up after login; a download or an installation that still makes
            progress gets six times as long. Default: 300.
        allow_env: variables such as PATH that `env` may set nevertheless. Default: none.
        build: packages that are built from source, which runs their code. Others are installed from wheels; what `pip`
            names by a path or in a repository is built without this. Default: none.
        allow_includes: files (names or patterns) that are sent although they look like credentials. Default: none.
        lock: the path of a pylock.toml, a uv.lock, or a requirements.txt with hashes: exactly what it lists is
            installed, with what Skyward needs where it lacks that. `pip` and plugins can only ask for what it has.
            Default: none.
        warm: whether the first pool on a cloud keeps this environment there as a machine image, from which later ones
            start. It costs a little every month: `sky ps` lists it, `sky down --warm` deletes it. Default: False.
    """

    python: str = "auto"
    pip: Sequence[str] = ()
    pip_indexes: Sequence[PipIndex] = ()
    apt: Sequence[str] = ()
    env: Mapping[str, str | Secret] = Variables()
    shell_vars: Mapping[str, str | Secret] = Variables()
    includes: Sequence[str] = ()
    excludes: Sequence[str] = ()
    bootstrap_timeout: float = 300
    allow_env: Sequence[str] = ()
    build: Sequence[str] = ()
    allow_includes: Sequence[str] = ()
    lock: str | None = None
    warm: bool = False

    def __post_init__(self) -> None:
        _check_python(self.python)
        for name in ("pip", "apt", "includes", "excludes", "allow_env", "build", "allow_includes"):
            object.__setattr__(self, name, check_texts(name, getattr(self, name)))
        for name in ("env", "shell_vars"):
            object.__setattr__(self, name, Variables(getattr(self, name), name))
        for entry in self.pip:
            _check_requirement(entry)
        for entry in self.includes:
            _check_include(entry)
        object.__setattr__(self, "build", check_names("build", self.build))
        object.__setattr__(self, "lock", _checked_lock(self.lock))
        check_number("bootstrap_timeout", self.bootstrap_timeout, whole=False)
        if type(self.warm) is not bool:
            raise InvalidArgument(f"warm={self.warm!r}: expected True or False.")
        self._check_indexes()
        self._check_apt()
        self._check_env()

    @property
    def python_version(self) -> tuple[int, int]:
        """Major and minor version of the node's Python."""
        if self.python == "auto":
            return sys.version_info[:2]
        major, _, minor = self.python.partition(".")
        return int(major), int(minor)

    @property
    def content_hash(self) -> str:
        """Hexadecimal SHA-256 of all but secrets; equal images on the same version of Python have the same."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "warm"}
        content |= {"python": self.python_version, "env": dict(self.env), "shell_vars": dict(self.shell_vars)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def environment_hash(self) -> str:
        """Hexadecimal SHA-256 of what is installed: no variables, no files of the user, no secret."""
        content = [self.python_version, self.pip, self.pip_indexes, self.apt, self.build]
        return hashlib.sha256(json.dumps(content, default=_plain).encode()).hexdigest()

    def adding(
        self,
        *,
        pip: Iterable[str] = (),
        pip_indexes: Iterable[PipIndex] = (),
        apt: Iterable[str] = (),
        env: Mapping[str, str | Secret] | None = None,
        build: Iterable[str] = (),
    ) -> Image:
        """A new image with these `pip`, `pip_indexes`, `apt`, `env` and `build` after its own; nothing is repeated."""
        return dataclasses.replace(
            self,
            pip=tuple(dict.fromkeys((*self.pip, *pip))),
            pip_indexes=tuple(dict.fromkeys((*self.pip_indexes, *pip_indexes))),
            apt=tuple(dict.fromkeys((*self.apt, *apt))),
            env={**self.env, **(env or {})},
            build=tuple(dict.fromkeys((*self.build, *build))),
        )

    def _check_indexes(self) -> None:
        indexes: object = self.pip_indexes
        if not isinstance(indexes, (list, tuple)) or not all(isinstance(i, PipIndex) for i in self.pip_indexes):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise InvalidArgument(
                "pip_indexes is not a list of PipIndex; an index needs the names of the packages that come from it. "
                'Write pip_indexes=[sky.PipIndex("https://...", packages=["name"])].'
            )
        object.__setattr__(self, "pip_indexes", tuple(self.pip_indexes))

    def _check_apt(self) -> None:
        for entry in self.apt:
            if not _SYSTEM_PACKAGE.fullmatch(entry):
                raise InvalidArgument(
                    f'apt holds {entry!r}, which is not the name of a system package. Write apt=["git", "ffmpeg"].'
                )

    def _check_env(self) -> None:
        if "COMPUTE_POOL" in self.env:
            raise InvalidArgument(
                "env sets COMPUTE_POOL, through which a pool tells its nodes who they are. Rename it."
            )
        for name in sorted(_LOADER.intersection(self.env).difference(self.allow_env)):
            raise InvalidArgument(
                f"env sets {name}, which decides what every program of the node loads. "
                f"If you mean it, add allow_env=[{name!r}]."
            )

    def __repr__(self) -> str:
        said = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Image({', '.join(f'{name}={mask(repr(getattr(self, name)))}' for name in said)})"


def _plain(value: object) -> object:
    return MASK if isinstance(value, Secret) else dict(vars(value))

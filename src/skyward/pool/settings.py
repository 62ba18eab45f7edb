"""Settings of a project: named pools in `sky.toml`, or in `pyproject.toml` under `[tool.skyward]`.

default = "lab"                     which pool is meant where none is named

[pools.lab]                         the options of sky.ComputePool
provider = {kind = "ssh", hosts = ["gpu1", "gpu2"]}
plugins = ["torch"]

[pools.lab.image]                   those of sky.Image
pip = ["torch", "numpy"]
env = {HF_TOKEN = {secret = "HF_TOKEN"}}        a sky.Secret, from a variable of this computer
"""

from __future__ import annotations

import inspect
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from skyward import extensions
from skyward.api.image import Image, PipIndex
from skyward.api.secret import Secret
from skyward.api.spec import Worker
from skyward.errors import InvalidArgument, SkywardError
from skyward.transport import private

__all__ = ["FILES", "Settings", "find_settings", "pool_options", "read_settings"]

FILES = ("sky.toml", "pyproject.toml")
_TOP = ("default", "pools")

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    path: Path
    pools: Mapping[str, Table] = field(default_factory=dict[str, Table])
    default: str | None = None

    def named(self, name: str | None) -> tuple[str, Table]:
        if name is not None and not isinstance(name, str):
            raise InvalidArgument(f"from_config({name!r}): expected the name of a pool; options have names, nodes=4.")
        chosen = name or self.default or (next(iter(self.pools)) if len(self.pools) == 1 else None)
        known = ", ".join(self.pools) or "none"
        if chosen is None:
            raise InvalidArgument(
                f"{self.path} has {len(self.pools)} pools ({known}), and does not say which is meant. Name one, or "
                'write default = "..." above them.'
            )
        if chosen not in self.pools:
            raise InvalidArgument(f"{self.path} has no pool {chosen!r}; there are: {known}. Write [pools.{chosen}].")
        return chosen, self.pools[chosen]


def find_settings(start: Path | None = None) -> Settings | None:
    """The settings of the project of `start`; None if it has none.

    The nearest folder upwards with a sky.toml, or a pyproject.toml with [tool.skyward], up to the root of a repository
    or the user's home. A file that another user may have written is refused: settings say which programs run here, and
    which variables and logins go where.
    """
    begin = (start or Path.cwd()).resolve()
    for folder in (begin, *begin.parents):
        for path in (folder / name for name in FILES):
            if path.is_file() and (found := _own(path)) is not None:
                return found
        if folder == Path.home().resolve() or (folder / ".git").exists():
            return None
    return None


def _own(path: Path) -> Settings | None:
    try:
        private.check_file(path)
    except FileNotFoundError:
        return None
    except private.NotPrivate as exc:
        try:
            if path.name == "pyproject.toml" and _read(path) is None:
                return None  # it has nothing to do with Skyward
        except InvalidArgument:
            return None  # nor does one that cannot be read
        raise InvalidArgument(
            f"{path} is not used: {exc}. Settings can run programs as you, so a file is used by default only if "
            f"nobody else can change it. If you trust it, name it: --config {shlex.quote(str(path))}, or "
            f"from_config(path=...)."
        ) from None
    return _read(path)


def read_settings(path: str | os.PathLike[str] | None = None) -> Settings:
    if path is None:
        found = find_settings()
        if found is None:
            raise InvalidArgument(
                "there is no sky.toml in this folder or above it, and no pyproject.toml with [tool.skyward]. "
                "`sky init` writes one, with examples."
            )
        return found
    found = _read(Path(path))
    if found is None:
        raise InvalidArgument(f"{path} has no table [tool.skyward].")
    return found


def pool_options(settings: Settings, name: str | None, parameters: Sequence[str]) -> dict[str, Any]:
    chosen, table = settings.named(name)
    where = f"{settings.path}, [pools.{chosen}]"
    _check_keys(table, parameters, where)
    options = dict(table)
    try:
        options.setdefault("name", None)
        if "provider" in options:
            options["provider"] = _made("providers", options["provider"], f"{where}, provider")
        if "plugins" in options:
            wanted = _listed(options["plugins"], f"{where}, plugins")
            options["plugins"] = [_made("plugins", each, f"{where}, plugins") for each in wanted]
        if "image" in options:
            options["image"] = _image(options["image"], f"{where}, image")
        if "worker" in options:
            options["worker"] = _called(Worker, options["worker"], f"{where}, worker")
    except InvalidArgument as exc:
        text = str(exc)
        raise (exc if text.startswith(str(settings.path)) else InvalidArgument(f"{where}: {text}")) from None
    return {key: value for key, value in options.items() if value is not None}


def _read(path: Path) -> Settings | None:
    try:
        content: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidArgument(f"{path} cannot be read: {exc}.") from None
    except tomllib.TOMLDecodeError as exc:
        raise InvalidArgument(f"{path} is not TOML: {exc}. Correct that line.") from None
    if path.name == "pyproject.toml":
        tools = content.get("tool", {})
        content = cast(Any, tools).get("skyward") if isinstance(tools, dict) else None
        if content is None:
            return None
    if not isinstance(content, dict):
        raise InvalidArgument(
            f"{path}: tool.skyward is a table. Write [tool.skyward.pools.lab], and below it nodes = 4."
        )
    content = cast("Table", content)
    _check_keys(content, _TOP, str(path))
    pools = content.get("pools", {})
    if not isinstance(pools, dict) or not all(isinstance(each, dict) for each in cast("Table", pools).values()):
        raise InvalidArgument(f"{path}: pools are tables. Write [pools.lab], and below it nodes = 4.")
    return Settings(path, cast("Mapping[str, Table]", pools), content.get("default"))


def _check_keys(table: Table, known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1, 0.6)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
            raise InvalidArgument(f"{where}: {key} is not known. {hint}")


def _made(group: extensions.Group, value: object, where: str) -> Any:
    if not isinstance(value, str | dict):
        raise InvalidArgument(
            f'{where}: {value!r} is neither a name nor a table. Write "ssh", or {{kind = "ssh", ...}}.'
        )
    table: dict[str, Any] = {"kind": value} if isinstance(value, str) else dict(cast("Table", value))
    kind = table.pop("kind", None)
    if isinstance(endpoint := table.get("endpoint_url"), str):
        from skyward.providers.aws.checks import check_endpoint  # not for other providers

        check_endpoint(endpoint, None, os.environ, where)
    if str(kind).lower() == "ray" and isinstance(address := table.get("address"), str) and table.get("token") is None:
        from skyward.providers.ray.jobs import check_named  # not for other providers

        check_named(address, where)
    points = {name.lower(): point for name, point in extensions.found(group).items()}
    if not isinstance(kind, str) or kind.lower() not in points:
        raise InvalidArgument(
            f"{where}: {kind!r} is not known. Write one of: {', '.join(sorted(points))}; with settings, "
            '{kind = "...", ...}.'
        )
    return _called(points[kind.lower()].load(), table, where)


def _image(value: object, where: str) -> Image:
    table: dict[str, Any] = dict(cast("Table", value)) if isinstance(value, dict) else {"pip": value}
    for name in ("env", "shell_vars"):
        if isinstance(table.get(name), dict):
            table[name] = {key: _plain_or_secret(each) for key, each in cast("Table", table[name]).items()}
    if "pip_indexes" in table:
        table["pip_indexes"] = [
            _called(PipIndex, index, f"{where}, pip_indexes")
            for index in _listed(table["pip_indexes"], f"{where}, pip_indexes")
        ]
    return _called(Image, table, where)


def _plain_or_secret(value: object) -> Any:
    table = cast("Table", value)
    if isinstance(value, dict) and set(table) == {"secret"}:
        return Secret.from_env(table["secret"])
    return cast(Any, value)


def _listed(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidArgument(f"{where}: expected a list, even for one: [...].")
    return cast("list[Any]", value)


def _called(make: Callable[..., Any], table: object, where: str) -> Any:
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where}: expected a table, {{name = value, ...}}.")
    settings = {key: _plain_or_secret(value) for key, value in cast("Table", table).items()}
    _check_keys(settings, list(inspect.signature(make).parameters), where)
    try:
        return make(**settings)
    except (SkywardError, TypeError) as exc:
        raise InvalidArgument(f"{where}: {exc}") from None

"""Small typed records: frozen for the type checker, plain slots at run time.

A frozen dataclass with slots takes four times as long to make, and fifteen times as long to define.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

__all__ = ["Record", "fields_of", "replace"]


@dataclass_transform(frozen_default=True)
class _Fields(type):
    """Slots from the annotations of a class. Defaults are shared, so they must be immutable."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], kw_only: bool = False, kind: str = ""
    ) -> _Fields:
        own = tuple(namespace.get("__annotations__", ()))
        inherited: Mapping[str, Any] = vars(bases[0]) if bases else {"__match_args__": (), "__defaults": {}}
        namespace |= {"__slots__": own, "__match_args__": (*inherited["__match_args__"], *own)}
        namespace["__defaults"] = inherited["__defaults"] | {
            field: namespace.pop(field) for field in own if field in namespace
        }
        return super().__new__(cls, name, bases, {**namespace, "__kw_only": kw_only, "__kind": kind})

    def __init__(cls, *_: Any, **__: Any) -> None: ...


def fields_of(record: type[Record]) -> list[str]:
    return list(vars(record)["__match_args__"])


class Record(metaclass=_Fields):
    def __init__(self, *given: Any, **named: Any) -> None:
        """Replaced when the first record is made: compiling takes time at import."""
        cls = type(self)
        body = "\n ".join(f"self.{field} = {field}" for field in fields_of(cls)) or "pass"
        made: dict[str, Any] = {}
        by_name = ("*",) if vars(cls)["__kw_only"] else ()
        exec(f"def __init__({', '.join(('self', *by_name, *fields_of(cls)))}):\n {body}", made)  # names of fields
        init, defaults = made["__init__"], vars(cls)["__defaults"]
        if by_name:
            init.__kwdefaults__ = defaults
        else:
            init.__defaults__ = tuple(defaults.values())
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        cls.__init__ = init
        init(self, *given, **named)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in fields_of(type(self)))

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, field) for field in fields_of(type(self))))

    def __repr__(self) -> str:
        shown = ", ".join(f"{field}={getattr(self, field)!r}" for field in fields_of(type(self)))
        return f"{type(self).__name__}({shown})"


R = TypeVar("R", bound=Record)


def replace(record: R, **changes: Any) -> R:
    made: R = object.__new__(type(record))
    for field in fields_of(type(record)):
        setattr(made, field, changes[field] if field in changes else getattr(record, field))
    return made

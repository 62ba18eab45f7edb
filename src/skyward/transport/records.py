"""Small typed records: frozen for the type checker, plain slots at run time.

A frozen dataclass with slots takes four times as long to make, and fifteen times as long to define. No more is promised
here than is needed where one is made per call: nothing stops a field from being assigned but the type checker.
"""

from __future__ import annotations

from typing import Any, dataclass_transform

__all__ = ["Record"]


@dataclass_transform(frozen_default=True)
class _Fields(type):
    """Makes slots of the annotations of a class. Defaults must be immutable: they are shared."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Fields:
        fields = tuple(namespace.get("__annotations__", ()))
        defaults = tuple(namespace.pop(field) for field in fields if field in namespace)
        return super().__new__(
            cls, name, bases, {**namespace, "__slots__": fields, "__match_args__": fields, "__defaults": defaults}
        )


class Record(metaclass=_Fields):
    def __init__(self, *given: Any, **named: Any) -> None:
        """Is replaced, in the class of the record, when the first one is made: compiling takes time at import."""
        cls = type(self)
        body = "\n ".join(f"self.{field} = {field}" for field in cls.__match_args__) or "pass"
        made: dict[str, Any] = {}
        exec(f"def __init__({', '.join(('self', *cls.__match_args__))}):\n {body}", made)  # names of fields only
        init = made["__init__"]
        init.__defaults__, init.__qualname__ = vars(cls)["__defaults"], f"{cls.__qualname__}.__init__"
        cls.__init__ = init
        init(self, *given, **named)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, field) == getattr(other, field) for field in self.__match_args__)

    def __repr__(self) -> str:
        shown = ", ".join(f"{field}={getattr(self, field)!r}" for field in self.__match_args__)
        return f"{type(self).__name__}({shown})"

"""Kinds of definitions that a function may refer to: each `use_...` needs one of them, and returns a plain value.

The tests put this file elsewhere, and load it as a program, a module, a package and a notebook.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, NewType, ParamSpec, Protocol, TypedDict, TypeVar

import attrs
import pydantic

T = TypeVar("T")
P = ParamSpec("P")
UserId = NewType("UserId", int)
LIMIT = 3
TABLE: dict[str, Callable[[int], int]] = {}


@functools.lru_cache(maxsize=8)
def cached(n: int) -> int:
    return n * LIMIT


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def describe(value: object) -> str:
    return "object"


@describe.register
def _(value: int) -> str:
    return f"int {value + LIMIT}"


@describe.register(list)
def _(value: Any) -> str:
    return "list of " + ", ".join(describe(item) for item in value)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

    @property
    def loud(self) -> str:
        return self.value.upper()


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    FAST = enum.auto()


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


@dataclasses.dataclass
class Point:
    x: int
    y: int = 1

    def moved(self, by: int) -> Point:
        return dataclasses.replace(self, x=self.x + by)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Frozen:
    x: int
    tags: tuple[str, ...] = dataclasses.field(default=("a",))


@dataclasses.dataclass(kw_only=True)
class Child(Point):
    z: int = 0

    def moved(self, by: int) -> Child:
        return dataclasses.replace(super().moved(by), z=by)


class Pair(NamedTuple):
    left: int
    right: int = 2

    def total(self) -> int:
        return self.left + self.right


Old = collections.namedtuple("Old", ["a", "b"])


class Movie(TypedDict):
    title: str
    year: int


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def map(self, fn: Callable[[T], T]) -> Box[T]:
        return Box(fn(self.value))


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> int: ...

    @classmethod
    def unit(cls) -> Shape:
        return Square(1)

    @staticmethod
    def scale(n: int) -> int:
        return n * LIMIT


class Square(Shape):
    def __init__(self, side: int) -> None:
        self.side = side

    @property
    def double(self) -> int:
        return self.side * 2

    @functools.cached_property
    def costly(self) -> int:
        return self.area() + 1

    def area(self) -> int:
        return self.side**2


class Sized(Protocol):
    def area(self) -> int: ...


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


class Meta(type):
    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Meta:
        return super().__new__(cls, name, bases, {**space, "made_by": "Meta"})


class Registered(metaclass=Meta):
    pass


class Base:
    known: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Base.known.append(cls.__name__)


class Derived(Base):
    pass


class Positive:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance: Any, value: int) -> None:
        if value < 0:
            raise ValueError("negative")
        setattr(instance, self.name, value)


class Account:
    balance = Positive()


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, n: int) -> int:
        return n + self.by

    @functools.lru_cache  # noqa: B019 - as people do
    def slow(self, n: int) -> int:
        return n + self.by

    @functools.singledispatchmethod
    def show(self, value: object) -> str:
        return "any"

    @show.register
    def _(self, value: int) -> str:
        return f"int {value + self.by}"

    twice = functools.partialmethod(__call__)


class Failure(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code


class Outer:
    class Inner:
        def answer(self) -> int:
            return 42


class Countdown:
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from range(self.n, 0, -1)


class Traced(Generic[P, T]):
    def __init__(self, fn: Callable[P, T]) -> None:
        self.fn = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return [self.fn(*args, **kwargs)]


@Traced
def listed(n: int) -> int:
    return n


def traced(fn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(fn)
    def inner(*args: int) -> int:
        return fn(*args) + 1000

    return inner


@traced
def decorated(n: int) -> int:
    return n


def register(fn: Callable[[int], int]) -> Callable[[int], int]:
    TABLE[fn.__name__] = fn
    return fn


@register
def tripled(n: int) -> int:
    return n * LIMIT


@contextlib.contextmanager
def opened(n: int) -> Iterator[int]:
    yield n + 1


def counter() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


async def soon(n: int) -> int:
    return n + 1


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n != 0 and even(n - 1)


add = Adder(10)
halved = functools.partial(pow, exp=2)
plus = lambda n: n + LIMIT  # noqa: E731
tick = counter()
settings = types.SimpleNamespace(rate=0.5, names=["a", "b"])
defaults: collections.defaultdict[str, list[int]] = collections.defaultdict(list, {"a": [1]})
ordered = functools.total_ordering(
    type("Ordered", (), {"__init__": lambda s, n: setattr(s, "n", n), "__lt__": lambda s, o: s.n < o.n})
)


class Leg(pydantic.BaseModel):
    km: int = pydantic.Field(gt=0)


class Trip(pydantic.BaseModel):
    name: str
    legs: list[Leg] = []

    @pydantic.field_validator("name")
    @classmethod
    def upper(cls, name: str) -> str:
        return name.upper()


@attrs.define
class Part:
    n: int
    tags: list[str] = attrs.field(factory=list)

    def grown(self) -> Part:
        return attrs.evolve(self, n=self.n + 1)


def use_lru_cache() -> Any:
    return cached(4), cached(4), cached.cache_info().maxsize, cached.__name__


def use_cache_that_calls_itself() -> Any:
    return fibonacci(30), fibonacci.cache_info().maxsize


def use_cached_method() -> Any:
    return add.slow(1), add.slow(1)


def use_cached_property() -> Any:
    return Square(3).costly


def use_singledispatch() -> Any:
    return describe("a"), describe(1), describe([1, "b"])


def use_singledispatchmethod() -> Any:
    return add.show(1), add.show("a")


def use_enum() -> Any:
    return Colour.RED.loud, Colour("blue").name, Colour.RED is Colour["RED"], [c.value for c in Colour]


def use_int_enum() -> Any:
    return Level.HIGH > Level.LOW, int(Level.HIGH)


def use_str_enum() -> Any:
    return f"{Mode.FAST}", Mode.FAST == "fast"


def use_flags() -> Any:
    return (Flags.A | Flags.B).value, Flags.A in (Flags.A | Flags.B)


def use_dataclass() -> Any:
    return dataclasses.asdict(Point(1).moved(2)), Point(1) == Point(1)


def use_frozen_dataclass() -> Any:
    return hash(Frozen(1)) == hash(Frozen(1)), sorted([Frozen(2), Frozen(1)])[0].x, Frozen(1).tags


def use_dataclass_with_super() -> Any:
    return dataclasses.asdict(Child(x=1).moved(4))


def use_named_tuple() -> Any:
    return Pair(1).total(), Pair(1)._asdict()


def use_old_named_tuple() -> Any:
    return Old(1, 2)._replace(a=5).a


def use_typed_dict() -> Any:
    return Movie(title="x", year=1)["year"], sorted(Movie.__required_keys__)


def use_new_type() -> Any:
    return UserId(5) + 1


def use_generic() -> Any:
    return Box[int](3).map(lambda n: n + 1).value


def use_abstract_class() -> Any:
    return Shape.unit().area(), Shape.scale(2), isinstance(Square(1), Shape), Square(4).double


def use_protocol() -> Any:
    def area(shape: Sized) -> int:
        return shape.area()

    return area(Square(2))


def use_slots() -> Any:
    return Slotted(3).x


def use_metaclass() -> Any:
    return Registered.made_by, type(Registered).__name__  # type: ignore[attr-defined]


def use_init_subclass() -> Any:
    return sorted(set(Base.known)), issubclass(Derived, Base)


def use_descriptor() -> Any:
    account = Account()
    account.balance = 3
    return account.balance


def use_callable_object() -> Any:
    return add(1)


def use_partial() -> Any:
    return halved(3), functools.partial(tripled, 2)()


def use_partialmethod() -> Any:
    return add.twice(4)


def use_own_exception() -> Any:
    try:
        raise Failure(3, "no")
    except Failure as exc:
        return exc.code, str(exc)


def use_nested_class() -> Any:
    return Outer.Inner().answer()


def use_iterator_class() -> Any:
    return list(Countdown(3))


def use_decorated_function() -> Any:
    return decorated(1), decorated.__name__


def use_generic_decorator_class() -> Any:
    return listed(1)


def use_registry() -> Any:
    return TABLE["tripled"](3)


def use_context_manager() -> Any:
    with opened(1) as n:
        return n


def use_closure() -> Any:
    return tick() > 0


def use_lambda() -> Any:
    return plus(1)


def use_coroutine() -> Any:
    try:  # by hand: a notebook's own loop is running
        soon(1).send(None)
    except StopIteration as done:
        return done.value


def use_mutual_recursion() -> Any:
    return even(10), odd(7)


def use_namespace() -> Any:
    return settings.rate, settings.names


def use_defaultdict() -> Any:
    return defaults["b"], defaults["a"]


def use_total_ordering() -> Any:
    return ordered(2) >= ordered(1)


def use_type_hints() -> Any:
    return sorted(typing.get_type_hints(Point)), sorted(typing.get_type_hints(Pair))


def use_pydantic_model() -> Any:
    return Trip(name="a", legs=[Leg(km="3")]).model_dump(), Trip.model_json_schema()["required"]


def use_attrs_class() -> Any:
    return attrs.asdict(Part(1).grown()), Part(1) == Part(1), repr(Part(2))


USES = {name: value for name, value in sorted(globals().items()) if name.startswith("use_")}

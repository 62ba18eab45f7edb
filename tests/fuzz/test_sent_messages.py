"""What our side sends, the other side takes; what it would refuse is the user's error, before anything is sent.

Whatever users pass goes through the code that sends it, over a frame, and through the checks of the receiver.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import skyward
from skyward.api.compute import Chunk, Compute, PendingCompute
from skyward.client.packing import Packing
from skyward.errors import InvalidArgument, NotSerializable, SharedTimeout, SharedTooLarge
from skyward.node import orders, protocol
from skyward.node.body import Bodies, RunnerCall
from skyward.node.protocol import AgentToClient, Blobs, ClientToAgent, Exited, Returned, Run, RunnerToAgent
from skyward.node.shared import protocol as shared_protocol
from skyward.node.shared.channel import Channel, pack_value, unpack_value
from skyward.node.shared.handles import (
    SharedBarrier,
    SharedCounter,
    SharedDict,
    SharedEvent,
    SharedLock,
    SharedQueue,
    SharedSet,
)
from skyward.node.shared.protocol import AskerToServer
from skyward.node.shared.state import SharedState
from skyward.pool.options import check_limits
from skyward.transport import blobs, codec
from skyward.transport.frames import FROM_NODE, FrameReader, encode
from skyward.transport.payload import Packer
from skyward.transport.records import replace

# pyright: reportPrivateUsage=false

FUZZ = settings.get_profile("fuzz")
ID = "0123456789ab"


def carried(messages: Any, buffers: Any, most_header: int | None = None) -> tuple[Any, list[Any]]:
    """Messages as they come out of a frame."""
    return decoded(b"".join(map(bytes, encode(messages, buffers, most_header))), most_header)


def decoded(data: bytes, most_header: int | None = None) -> tuple[Any, list[Any]]:
    """What a reader makes of a frame."""
    pieces = iter([data[at : at + (1 << 18)] for at in range(0, len(data), 1 << 18)])

    def recv_into(room: memoryview) -> int:
        piece = next(pieces)
        room[: len(piece)] = piece
        return len(piece)

    reader, found = FrameReader(most_header), []
    while not found:
        found, _ = reader.read(recv_into)
    [(header, views)] = found
    return header, list(map(bytes, views))


def comes(link: type[codec.Direction], message: codec.Message) -> None:
    """Sends a message; raises Malformed if the receiver refuses it."""
    raw, buffers = message.encoded()
    assert link.messages()[raw[0]] is type(message)
    for heard, its_buffers in codec.split(*carried([raw], list(buffers), FROM_NODE if link is AgentToClient else None)):
        assert codec.decoder(type(message))(heard, its_buffers).encoded()[0] == heard


huge = st.sampled_from([10**400, -(10**400), 1 << 31, 1 << 63, (1 << 63) - 1, 1 << 64, -(1 << 63), -1, 0])
numbers = st.one_of(st.integers(), st.floats(), huge, st.booleans())
texts = st.text(max_size=20) | st.text(st.characters(codec=None), max_size=5) | st.just("\udc80")
plain = st.one_of(st.none(), numbers, texts, st.binary(max_size=20))
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.lists(inner, max_size=3))


class Odd:
    """A callable whose name is whatever was given."""

    def __init__(self, name: Any) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(scope="module")
def packing() -> Iterator[Packing]:
    store = blobs.Store()
    yield Packing(Packer(), store, shared=True)
    store.close()


@FUZZ
@given(
    name=st.one_of(texts, numbers, st.just("n" * 100_000)),
    label=texts,
    timeout=st.none() | numbers,
    of_function=st.none() | numbers,
    retries=numbers,
    args=st.lists(anything, max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "ä"]), anything, max_size=2),
    chunk=st.none() | st.builds(Chunk, st.integers(1, 9), st.none() | st.integers(0, 9), st.booleans()),
)
@example("f", "", math.inf, None, 0, [], {}, None)
@example("f", "", 10**400, math.inf, 0, [], {}, None)
def test_every_call_that_can_be_made_is_taken(
    packing: Packing,
    name: Any,
    label: str,
    timeout: Any,
    of_function: Any,
    retries: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    chunk: Chunk | None,
) -> None:
    try:
        made: PendingCompute[Any] = Compute(Odd(name), of_function)(*args, **kwargs)
        made = PendingCompute(made.fn, made.args, made.kwargs, made.timeout, None, label, chunk=chunk)
        made = made.with_timeout(timeout).with_retries(retries)
        [call] = packing.calls([made], 3)
    except (InvalidArgument, NotSerializable):
        return
    comes(ClientToAgent, Run(ID, call.header, call.pieces))


@FUZZ
@given(numbers, numbers, st.none() | numbers)
@example(10**400, 1, None)
@example(1.0, 1 << 64, None)
@example(1.0, 1, 10**400)
def test_every_limit_that_a_pool_takes_is_taken_by_its_nodes(grace: Any, most: Any, default: Any) -> None:
    try:
        check_limits(1.0, grace, most, default, None)
    except InvalidArgument:
        return
    comes(ClientToAgent, ClientToAgent.Bye(grace))
    comes(ClientToAgent, ClientToAgent.Cancel(ID, "cancelled", grace))
    for limit in (most, 0.0 if default is None else default):
        comes(ClientToAgent, ClientToAgent.Bye(limit))


class Ends:
    """How a body may end: what it returns, yields, raises, or exits with."""

    def __init__(self, how: str, value: Any) -> None:
        self.how, self.value = how, value

    def __call__(self) -> Any:
        if self.how == "return":
            return self.value
        if self.how == "yield":
            return (item for item in self.value)
        if self.how == "exit":
            sys.exit(self.value)
        raise self.value


class Told(Exception):
    """An exception of the user's, with any arguments and any text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.detail = args


endings = st.one_of(
    st.tuples(st.just("return"), anything),
    st.tuples(st.just("yield"), st.lists(anything, max_size=3)),
    st.tuples(st.just("exit"), anything),
    st.tuples(st.just("raise"), st.lists(anything, max_size=3).map(lambda args: Told(*args))),
    st.tuples(st.just("raise"), texts.map(lambda text: type("N" * 1000, (ValueError,), {})(text))),
)


@settings(FUZZ, max_examples=max(40, FUZZ.max_examples // 4))
@given(endings)
@example(("exit", 2**31))
@example(("exit", True))
@example(("return", bytes(3 << 20)))
@example(("yield", [bytes(3 << 20)]))
@example(("raise", ValueError("x" * (3 << 20))))
@example(("raise", ValueError("\0" * (3 << 20))))
def test_however_a_body_ends_its_verdict_is_taken(
    tmp_path_factory: pytest.TempPathFactory, ending: tuple[str, Any]
) -> None:
    sent: list[codec.Message] = []
    directory = str(tmp_path_factory.mktemp("runner"))
    bodies = Bodies({"paths": [], "blobs": directory, "max_result": 1 << 30}, sent.append)
    head, buffers = Packer().pack(Ends(*ending), "a body")
    function = [head, *map(bytes, buffers)]
    about = {"name": "f", "fn": "", "split": len(function), "attempt": 0}
    call = RunnerCall(ID, about, [*function, Packer().pack(((), {}), "arguments")[0]])
    verdict = bodies.run(call)(id=ID, seconds=0.5)
    for message in [*sent, verdict]:
        comes(RunnerToAgent, message)
    if isinstance(verdict, Exited):
        verdict = replace(verdict, stderr="its last words")
    for message in [*sent, verdict]:  # the agent passes them on
        comes(AgentToClient, message)


whole = st.integers(0, (1 << 63) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0, 1e300) | whole
named = st.dictionaries(texts, texts, max_size=2)
blobs_of = st.dictionaries(st.just("0"), st.tuples(texts, whole), max_size=1)
LINKS: list[type[codec.Direction]] = [
    link
    for module in (protocol, orders, shared_protocol)
    for link in vars(module).values()
    if inspect.isclass(link) and link.__bases__ == (codec.Direction,)
]


def contains_bytes(value: Any) -> bool:
    """Whether something has bytes in it, which are no part of messages."""
    return isinstance(value, bytes) or (isinstance(value, list | tuple) and any(map(contains_bytes, value)))  # pyright: ignore[reportUnknownArgumentType] - any parts


def values_of(hint: Any, extras: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """What a sender may put into a field of this type."""
    origin, parts = get_origin(hint), get_args(hint)
    length = next((extra for extra in extras if isinstance(extra, codec.Length)), codec.Length(0, 2))
    within = next((extra for extra in extras if isinstance(extra, codec.Within)), None)
    if hint == Blobs:
        return blobs_of
    if origin in (Annotated, NotRequired):
        return values_of(parts[0], parts[1:])
    if origin in (UnionType, Union):
        return st.one_of(*(values_of(part, extras) for part in parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        return st.tuples(*map(values_of, parts))
    if origin is list:
        return st.lists(values_of(parts[0]), min_size=length.least, max_size=min(length.most, 2 + length.least))
    if origin is dict:
        return st.dictionaries(texts, values_of(parts[1]), max_size=min(length.most, 2))
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        optional = {name: values_of(each) for name, each in hints.items() if get_origin(each) is NotRequired}
        required = {name: values_of(each) for name, each in hints.items() if name not in optional}
        return st.fixed_dictionaries(required, optional=optional)
    if hint is int and within is not None:
        return st.integers(int(within.least), int(within.most))
    if hint is float and within is not None:
        return st.floats(max(within.least, -1e300), min(within.most, 1e300))
    if hint is str:
        return texts.map(lambda text: text[: length.most] if extras else text)
    return {int: whole, float: finite, bool: st.booleans(), NoneType: st.none(), Any: texts | whole}[hint]


@st.composite
def typed_messages(draw: st.DrawFn, message: type[codec.Message]) -> codec.Message:
    """A message with anything that its sender may put into it."""
    fields = dict[str, Any]()
    for name, hint in get_type_hints(message, include_extras=True).items():
        fields[name] = draw(values_of(hint) if name != "buffers" else st.lists(st.binary(max_size=20), max_size=2))
    if "buffers" in fields:  # as many as there have to be
        fields["buffers"] = [*fields["buffers"], b"1", b"2"][:1]
    if message is AgentToClient.Items:
        fields["items"] = [draw(st.just(1) | st.tuples(st.just(1), st.just({"blobs": {"0": ("a", 1)}})))]
    if "message" in fields:
        fields["message"] = ["gone", "why", 0]
    if message is Run:
        fields["id"], fields["header"]["split"] = ID, 0
    if message is Returned:
        fields["seconds"] = fields["seconds"] or 0.0
    return message(**fields)


@pytest.mark.parametrize(("link", "message"), [(link, part) for link in LINKS for part in link.messages().values()])
@settings(FUZZ, max_examples=max(15, FUZZ.max_examples // 200))
@given(data=st.data())
def test_every_message_that_can_be_made_is_taken(
    link: type[codec.Direction], message: type[codec.Message], data: st.DataObject
) -> None:
    comes(link, data.draw(typed_messages(message)))


def test_every_link_has_its_property() -> None:
    found = {
        name
        for path in Path(skyward.__file__).parent.rglob("*.py")
        for name in re.findall(r"^class (\w+)\((?:\w+\.)?Direction\)", path.read_text(), re.M)
    }
    assert {link.__name__ for link in LINKS} == found


class Loop:
    """A process and the server, with a frame in between each way."""

    packer: ClassVar[Packer] = Packer()

    def __init__(self) -> None:
        self.state = SharedState("e")
        self.state.open("p", "rank 0", 0)
        self.answers: list[tuple[str, Any]] = []
        self._server = codec.Receiver(AskerToServer, self)
        self.channel = Channel(self._post, lambda value, what: pack_value(self.packer, value, what), unpack_value)

    def _post(self, message: list[Any], values: list[Any]) -> None:
        for heard, buffers in codec.split(*carried([message], values)):
            self._server.receive(heard, buffers)

    def _answered(self, answers: list[Any]) -> None:
        for _, answer, values in answers:
            self.answers.append((answer[3], answer[4]))
            for heard, buffers in codec.split(*carried([answer], values)):
                self.channel.receive(heard, buffers)

    @codec.handles(AskerToServer.Open)
    def _opened(self, message: AskerToServer.Open) -> None: ...

    @codec.handles(AskerToServer.Gone)
    def _gone(self, message: AskerToServer.Gone) -> None: ...

    @codec.handles(AskerToServer.Withdraw)
    def _withdrawn(self, message: AskerToServer.Withdraw) -> None:
        self._answered(self.state.withdraw("p", message.id))

    @codec.handles(AskerToServer.Ask)
    def _asked(self, asked: AskerToServer.Ask) -> None:
        question = (asked.id, asked.epoch, asked.kind, asked.name, asked.operation, asked.arguments, asked.timeout)
        self._answered(self.state.ask("p", *question, list(asked.buffers), 0.0))


keys = anything | st.just(((((1,),),),))
timeouts = st.sampled_from([0, 0.0]) | st.sampled_from([-1, math.nan, "1", True])
handle_names = texts | numbers | st.just("n" * 201)


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@st.composite
def operations(draw: st.DrawFn) -> Callable[[Loop], Any]:
    """Something that a user does with a shared collection."""
    name = draw(handle_names if draw(st.integers(0, 9)) == 0 else st.just("x"))
    key, value, number, timeout = draw(keys), draw(anything), draw(numbers), draw(timeouts)
    many = draw(st.lists(keys.filter(is_hashable), max_size=3))
    size = draw(st.none() | numbers)

    def dicts(loop: Loop) -> SharedDict[Any, Any]:
        return SharedDict(name, lambda: loop.channel)

    def sets(loop: Loop) -> SharedSet[Any]:
        return SharedSet(name, lambda: loop.channel)

    def queues(loop: Loop) -> SharedQueue[Any]:
        return SharedQueue(name, lambda: loop.channel, size)

    return draw(
        st.sampled_from(
            [
                lambda loop: dicts(loop).__setitem__(key, value),
                lambda loop: dicts(loop).get(key),
                lambda loop: dicts(loop).pop(key, None),
                lambda loop: dicts(loop).setdefault(key, value),
                lambda loop: dicts(loop).update(dict.fromkeys(many, value)),
                lambda loop: dicts(loop).change(key, lambda old: value, None),
                lambda loop: (dicts(loop).keys(), dicts(loop).items(), dicts(loop).values(), len(dicts(loop))),
                lambda loop: key in dicts(loop),
                lambda loop: sets(loop).update(many),
                lambda loop: sets(loop).add(key),
                lambda loop: sets(loop).discard(key),
                lambda loop: (sets(loop).members(), list(sets(loop)), sets(loop).clear()),
                lambda loop: SharedCounter(name, lambda: loop.channel).add(number),
                lambda loop: SharedCounter(name, lambda: loop.channel).set(number),
                lambda loop: queues(loop).put(value, timeout),
                lambda loop: (queues(loop).get(timeout), len(queues(loop))),
                lambda loop: SharedLock(name, lambda: loop.channel).acquire(timeout),
                lambda loop: SharedBarrier(name, lambda: loop.channel, size).wait(timeout),
                lambda loop: SharedEvent(name, lambda: loop.channel).wait(timeout),
            ]
        )
    )


@settings(FUZZ, max_examples=FUZZ.max_examples * 2)
@given(st.lists(operations(), min_size=1, max_size=4))
def test_what_is_asked_of_a_collection_is_taken_or_the_askers_error(steps: list[Callable[[Loop], Any]]) -> None:
    loop = Loop()
    for step in steps:
        try:
            step(loop)
        except (InvalidArgument, SharedTooLarge, NotSerializable, KeyError, SharedTimeout):
            pass
        assert loop.state.waiting == 0
    # the server refuses only what depends on the collection, such as its kind; the rest the asker has checked
    assert not [text for code, text in loop.answers if code == "argument" and "cannot do" in text]

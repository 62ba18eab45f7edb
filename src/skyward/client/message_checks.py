"""What nodes say, looked into before it counts: metadata of verdicts, items, samples, stacks, greetings.

`node/receiver.py` checks the types of fields. This looks inside them, so that what a node sends breaks its own link at
most. All of it raises Malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from skyward.node.protocol import VERDICTS
from skyward.node.receiver import Check, Malformed, is_number, is_numbers, is_texts, is_whole

__all__ = ["CHECKS", "checked_about"]

Test = Callable[[Any], bool]

_MOST_GPUS = 256
_LONGEST_NAME = 1000


def checked_about(greeting: dict[str, Any]) -> dict[str, Any]:
    _look(greeting, _ABOUT, (), "a greeting")
    return greeting


def _verdict(message: list[Any], buffers: list[Any]) -> None:
    kind, _, metadata, _ = message
    _look(metadata, _METADATA, _REQUIRED.get(kind, ()), kind)
    _check_blobs(metadata, len(buffers))
    if kind == "error" and not buffers:
        raise Malformed("an error without its buffer")


def _failed(message: list[Any], buffers: list[Any]) -> None:
    if not _is_error(message[1]) or not buffers:
        raise Malformed("a failure without its text or its buffer")


def _items(message: list[Any], buffers: list[Any]) -> None:
    total = 0
    for entry in message[2]:
        count: Any = entry[0] if _is_pair(entry) else entry
        about: dict[str, Any] = entry[1] if _is_pair(entry) else {}
        if not is_whole(count) or about.__class__ is not dict:
            raise Malformed("items without their numbers of buffers")
        _look(about, _METADATA, (), "items")
        _check_blobs(about, count)
        total += count
    if total != len(buffers):
        raise Malformed(f"items with {len(buffers)} buffers instead of {total}")


def _brought(message: list[Any], buffers: list[Any]) -> None:
    _look(message[2], _METADATA, (), "a result")
    _check_blobs(message[2], len(message[2].get("blobs", {})))


def _one_buffer(message: list[Any], buffers: list[Any]) -> None:
    if len(buffers) != 1:
        raise Malformed(f"{message[0]!r} with {len(buffers)} buffers")


def _out(message: list[Any], buffers: list[Any]) -> None:
    _one_buffer(message, buffers)
    if message[1] not in ("stdout", "stderr"):
        raise Malformed("output of an unknown stream")


def _sample(message: list[Any], buffers: list[Any]) -> None:
    if len(message[4]) > _MOST_GPUS:
        raise Malformed("a sample of more GPUs than there are")
    for gpu in message[4]:
        if not (gpu.__class__ is list and 2 <= len(gpu) <= 7 and is_whole(gpu[0]) and gpu[1].__class__ is str):
            raise Malformed("a sample of what is no GPU")
        if len(gpu[1]) > _LONGEST_NAME:
            raise Malformed("a sample of a GPU with an endless name")
        if not all(value is None or is_number(value) for value in gpu[2:]):
            raise Malformed("a sample of a GPU without figures")


def _standing(message: list[Any], buffers: list[Any]) -> None:
    for body in message[2]:
        _look(body, _BODY, ("place", "state", "cpu"), "a stack")
        facts: dict[str, Any] = body.get("facts") or {}
        _look(facts, _FACTS, (), "facts")


def _notice(message: list[Any], buffers: list[Any]) -> None:
    if message[1] < 0:
        raise Malformed("a notice of what is over")


def _ports(message: list[Any], buffers: list[Any]) -> None:
    if not all(0 < port < 1 << 16 for port in message[1]):
        raise Malformed("what is no port")


def _files(message: list[Any], buffers: list[Any]) -> None:
    _look(message[2], _FILES, (), "an answer about files")
    if len(buffers) > 1:
        raise Malformed("an answer about files with several buffers")


def _look(given: Mapping[str, Any], tests: Mapping[str, Test], required: tuple[str, ...], what: str) -> None:
    for name, value in given.items():
        test = tests.get(name)
        if test is not None and not test(value):
            raise Malformed(f"{what} whose {name} is {str(value)[:80]}")
    for name in required:
        if name not in given:
            raise Malformed(f"{what} without {name}")


def _check_blobs(metadata: Mapping[str, Any], pieces: int) -> None:
    for index, blob in metadata.get("blobs", {}).items():
        if not (index.isdecimal() and len(index) < 9 and int(index) < max(pieces, 1)):
            raise Malformed("a blob for no buffer")
        if not (_is_pair(blob) and blob[0].__class__ is str and is_whole(blob[1])):
            raise Malformed("a blob without name and size")


def _is_pair(value: Any) -> bool:
    return value.__class__ is list and len(value) == 2


def _is_text(value: Any) -> bool:
    return value.__class__ is str


def _is_bool(value: Any) -> bool:
    return value.__class__ is bool


def _is_dict(value: Any) -> bool:
    return value.__class__ is dict


def _is_amount(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_code(value: Any) -> bool:
    return value.__class__ is int and abs(value) < 1 << 31


def _is_error(value: Any) -> bool:
    if value.__class__ is not dict:
        return False
    known = cast("dict[str, Any]", value)
    texts = all(known.get(name).__class__ is str for name in ("type", "message", "traceback"))
    return texts and is_texts(known.get("notes", []))


def _is_file_error(value: dict[str, Any]) -> bool:
    return is_whole(value.get("errno")) and _is_text(value.get("text")) and _is_text(value.get("path"))


def _is_frames(value: Any) -> bool:
    return value is None or (value.__class__ is list and all(map(_is_frame, value)))


def _is_frame(value: Any) -> bool:
    known = value.__class__ is list and len(value) == 3
    return known and _is_text(value[0]) and is_whole(value[1]) and _is_text(value[2])


def _is_shards(value: Any) -> bool:
    if value.__class__ is not dict:
        return False
    return all(is_numbers(part) and len(part) in (0, 3) for part in value.values())


def _is_gpus(value: Any) -> bool:
    return value.__class__ is list and all(map(_is_gpu, value))


def _is_gpu(value: Any) -> bool:
    if value.__class__ is not dict or not {"uuid", "name"} <= value.keys() <= _GPU.keys():
        return False
    return all(_GPU[name](part) for name, part in cast("dict[str, Any]", value).items())


_GPU: dict[str, Test] = {
    "index": is_whole,
    "uuid": _is_text,
    "name": _is_text,
    "memory": is_whole,
    "vendor": _is_text,
    "card": _is_text,
}
_METADATA: dict[str, Test] = {
    "s": _is_amount,
    "blobs": _is_dict,
    "kept": _is_text,
    "failed": lambda value: _is_pair(value) and is_whole(value[0]) and _is_text(value[1]),
    "group": _is_bool,
    "replaced": _is_bool,
    "preempted": _is_bool,
    "place": is_whole,
    "error": _is_error,
    "code": _is_code,
    "stderr": _is_text,
    "oom": _is_bool,
    "shared": _is_code,
    "limit": _is_amount,
    "killed": _is_bool,
    "loading": _is_bool,
    "stack": _is_text,
    "reason": _is_text,
    "size": is_whole,
    "incomplete": _is_text,
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "done": ("s",),
    "error": ("error",),
    "exited": ("code", "stderr"),
    "crashed": ("code", "stderr", "oom", "shared"),
    "timeout": ("limit", "killed"),
    "lost": ("reason",),
    "noroom": ("size", "reason"),
}
_BODY: dict[str, Test] = {
    "place": is_whole,
    "state": _is_text,
    "cpu": _is_amount,
    "call": _is_text,
    "name": _is_text,
    "seconds": is_number,
    "frames": _is_frames,
    "problem": _is_text,
    "facts": _is_dict,
}
_FACTS: dict[str, Test] = {
    "collectives": lambda value: value is None or is_whole(value),
    "shards": _is_shards,
    "threads": lambda value: value.__class__ is list and all(map(_is_frames, value)),
}
_FILES: dict[str, Test] = {
    "error": lambda value: value.__class__ is dict and _is_file_error(value),
    "entries": lambda value: value.__class__ is list,
    "root": _is_text,
    "left_out": is_texts,
    "have": lambda value: value.__class__ is list and all(part is None or is_whole(part) for part in value),
    "pieces": lambda value: value.__class__ is list,
    "folder": _is_bool,
    "missing": _is_bool,
}
_ABOUT: dict[str, Test] = {
    "node": is_whole,
    "python": is_numbers,
    "path": is_texts,
    "hostname": _is_text,
    "system": _is_text,
    "pid": is_whole,
    "accelerators": is_whole,
    "gpus": _is_gpus,
    "cards": is_whole,
    "others": _is_dict,
    "problem": _is_text,
    "gpu_names": is_texts,
    "gpu_variable": _is_text,
    "cpus": lambda value: is_whole(value) and value > 0,
    "received": is_whole,
    "unread": is_whole,
}
CHECKS: dict[str, Check] = {
    **dict.fromkeys(VERDICTS, _verdict),
    "brought": _brought,
    "failed": _failed,
    "files": _files,
    "items": _items,
    "notice": _notice,
    "out": _out,
    "part": _one_buffer,
    "ports": _ports,
    "sample": _sample,
    "standing": _standing,
}

"""Turns the bytes of an input into numbers, choices and messages. Behind its end an input is all zeroes."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from railrelay.client import protocol

_EDGES: Final = (0, 1, 7, 8, 15, 16, 63, 64, 255, 256, 4096, 65535, 65536, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63)
_FLOATS: Final = (0.0, 0.01, 0.05, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e300)
_TEXTS: Final = (
    "", "host", "device", "vmm", "ipc", "tcp", "verbs", "emulated", "127.0.0.1", "::1", "0.0.0.0", "127.0.0.1:1",
    "[::1]:2", "a:b", "x" * 300, "y" * 200_000, "\0", "\n\x1b[2J", "\u00e9\U0001f600", "busy", "draining", "peer_lost",
)  # fmt: skip

T = TypeVar("T")


class Input:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def choice(self, among: Sequence[T]) -> T:
        return among[self.byte() % len(among)]

    def number(self, known: Sequence[int] = ()) -> int:
        """Often one of ``known``, else small, at an edge, or any of 64 bits."""
        kind = self.byte()
        if known and kind < 0x60:
            return known[kind % len(known)]
        if kind < 0x80:
            return kind & 31
        if kind < 0xE0:
            edge = _EDGES[kind % len(_EDGES)] + (kind >> 5 & 3) - 1
            return -edge if kind & 16 else edge
        value = int.from_bytes(self.take((kind & 7) + 1), "big")
        return -value // 2 if kind & 8 else value


class Known:
    """Numbers, texts and secrets that mean something to the daemon, to be met by chance."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.texts: list[str] = []
        self.secrets: list[bytes] = []


def message(kind: type[Any], source: Input, known: Known, **fields: object) -> Any:  # noqa: ANN401
    """A message of this kind with fields from the input, but for those that are given."""
    hints = typing.get_type_hints(kind)
    made = {name: _value(hints[name], source, known) for name in kind.__struct_fields__ if name not in fields}
    return kind(**made, **fields)


def _value(hint: Any, source: Input, known: Known) -> Any:  # noqa: ANN401
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        items = [_value(typing.get_args(hint)[0], source, known) for _ in range(source.byte() % 5)]
        return items if origin is list else tuple(items)
    if origin is types.UnionType:
        return None if source.byte() & 1 else _value(typing.get_args(hint)[0], source, known)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return message(hint, source, known)
    match hint.__name__:
        case "bool":
            return bool(source.byte() & 1)
        case "int":
            return min(max(source.number(known.numbers), -(1 << 63)), (1 << 64) - 1)  # what msgpack can carry
        case "float":
            return source.choice(_FLOATS)
        case "str":
            return source.choice([*known.texts, *_TEXTS])
        case "bytes":
            kind = source.byte()
            if known.secrets and kind < 0xA0:
                return known.secrets[kind % len(known.secrets)]
            return source.take(kind & 31) if kind < 0xF0 else bytes(1 << (kind & 15) + 2)
    raise AssertionError(hint)


def kinds_of(union: object) -> list[type[protocol.Message]]:
    return list(typing.get_args(union))


def bent(packet: bytes, source: Input) -> bytes:
    """With some of its bytes changed, left out, or put twice."""
    changed = bytearray(packet)
    for _ in range(source.byte() % 4):
        at = source.byte() % (len(changed) + 1)
        match source.byte() % 3:
            case 0 if at < len(changed):
                changed[at] = source.byte()
            case 1:
                del changed[at : at + 1 + source.byte() % 8]
            case _:
                changed[at:at] = source.take(1 + source.byte() % 8)
    return bytes(changed)

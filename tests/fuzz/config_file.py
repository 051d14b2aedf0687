"""The configuration file: any text is a configuration or a ConfigError of one line, and what is taken can be used."""

from __future__ import annotations

import contextlib
from typing import Final

from fuzz.reading import Input
from fuzz.scene import temporary
from railrelay.daemon import config
from railrelay.daemon.memory import client_areas

_LINES: Final = [line.lstrip("# ") for line in config.EXAMPLE.splitlines() if "=" in line or line.startswith("[")]
_VALUES: Final = (
    "0", "1", "-1", "2", "64", "9223372036854775807", "1e308", "nan", "inf", "-0.0", "true", '""', '"1GiB"', '"8MiB"',
    '"0x10"', "[]", "[0, 1]", "{}", "1979-05-27", '"127.0.0.1"', '"::1"', '"\\u0000"', "9" * 5000, "[" * 2000,
    '"' + "9" * 5000 + 'GiB"',
)  # fmt: skip
_path: Final = temporary() / "daemon.toml"


def _text(source: Input) -> bytes:
    """Lines of the example, their values changed, in any order; or any bytes."""
    lines: list[bytes] = []
    while not source.ended:
        kind, line = source.byte() % 8, source.choice(_LINES)
        if kind == 0:
            lines.append(source.take(source.byte()))
        elif kind < 4 and "=" in line:
            lines.append(f"{line.partition('=')[0]}= {source.choice(_VALUES)}".encode())
        else:
            lines.append(line.encode())
    return b"\n".join(lines)


def run(data: bytes) -> None:
    source = Input(data)
    _path.write_bytes(data[1:] if source.byte() & 1 else _text(source))
    with contextlib.suppress(config.ConfigError):
        loaded = config.load(_path)
        assert sum(plan.stride * plan.elements for plan in client_areas(loaded)) < 1 << 48
        assert loaded.relay.lane_bytes > 0
        assert loaded.rail_of(0) in (None, *range(len(loaded.rail)))
        return

from dataclasses import dataclass

@dataclass(frozen=True)
class Field:
    offset: int
    count: int
    ctype: str
    size: int
    writer: str

FIELDS: dict[str, dict[str, Field]]
SIZES: dict[str, int]
CONSTANTS: dict[str, int]
RESULTS: dict[str, int]
RAIL_COUNTERS: tuple[str, ...]

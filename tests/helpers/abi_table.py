"""The ABI as text, one line a fact, for the golden table of its major version. After an intended change:

PYTHONPATH=tests python -m helpers.abi_table > tests/golden/abi-<major>.txt
"""

from __future__ import annotations

from railrelay.shm_layout import abi


def table() -> str:
    lines = [f"{name} = {value}" for name, value in abi.CONSTANTS.items() if name != "ABI_MINOR"]
    lines += [f"result {name} = {value}" for name, value in abi.RESULTS.items()]
    lines += [f"rail counter {number} = {label}" for number, label in enumerate(abi.RAIL_COUNTERS)]
    for structure, fields in abi.FIELDS.items():
        lines.append(f"{structure}: {abi.SIZES[structure]} bytes")
        for name, facts in fields.items():
            count = f"[{facts.count}]" if facts.count > 1 else ""
            lines.append(f"  {facts.offset:5} {facts.ctype}{count} {name} ({facts.writer})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")

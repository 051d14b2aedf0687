"""Fault points (faults.h): places in this program at which it can be told to kill itself, for tests."""

from collections.abc import Callable
from typing import Final

VARIABLE: Final[str]  # of the environment: "name" or "name:passage", for processes that have no configuration
POINTS: Final[dict[str, str]]  # name -> what has happened there and what has not

def join(arm: Callable[[int, int], None]) -> None:
    """For a compiled module with points of its own: arm(number, passages) is called now and at each arm()."""

def parsed(text: str) -> tuple[str, int]:
    """(name, passage) of "name" or "name:passage". ValueError: there is no such point."""

def arm(text: str) -> None:
    """This process kills itself at that passage of the point, "name" or "name:passage"; "" for none. ValueError."""

def point(name: str) -> None:
    """Here is that point."""

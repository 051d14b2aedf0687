"""railrelay's client library. The names below are the public interface; see Client.connect().

They are loaded on first use: the daemon and the admin commands need parts of this package without the C data path.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from railrelay.client.client import Client, Route
    from railrelay.client.core import HostEvent
    from railrelay.client.errors import (
        ArgumentError,
        Busy,
        ConnectError,
        DaemonGone,
        ErrorCode,
        PeerError,
        RegionError,
        RelayError,
        Result,
        TransferError,
        Unsettled,
        WaitTimeout,
    )
    from railrelay.client.gpu_memory import GpuOptions
    from railrelay.client.layout import PageLayout
    from railrelay.client.peers import Peer
    from railrelay.client.protocol import Notification
    from railrelay.client.regions import Buffer, Region, RemoteRegion
    from railrelay.client.transfer import Transfer, tag_of

__all__ = [
    "ArgumentError",
    "Buffer",
    "Busy",
    "Client",
    "ConnectError",
    "DaemonGone",
    "ErrorCode",
    "GpuOptions",
    "HostEvent",
    "Notification",
    "PageLayout",
    "Peer",
    "PeerError",
    "Region",
    "RegionError",
    "RelayError",
    "RemoteRegion",
    "Result",
    "Route",
    "Transfer",
    "TransferError",
    "Unsettled",
    "WaitTimeout",
    "tag_of",
]

_MODULES = ("errors", "protocol", "layout", "transfer", "regions", "peers", "gpu_memory", "client", "core")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"railrelay.client.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The trace of one rail, read from a mapped node segment while its rail goes on writing."""

class TraceReader:
    """Reads each record once, the oldest first; with ``only_new`` those that are written from now on."""
    def __init__(self, memory: memoryview, offset: int, records: int, *, only_new: bool) -> None:
        """ValueError: ``records`` is no power of two, or they do not lie in ``memory``."""
    @property
    def lost(self) -> int:
        """Records that were overwritten before they could be read."""
    def close(self) -> None:
        """Lets go of ``memory``; nothing more is read."""
    def read(self, most: int) -> bytes:
        """At most this many ``trace_record`` structures, one after the other; fewer when no more are written yet."""

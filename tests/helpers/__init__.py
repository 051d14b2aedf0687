"""What tests share. Imported as ``helpers...`` (pytest's pythonpath is tests/), also by the processes that tests start."""

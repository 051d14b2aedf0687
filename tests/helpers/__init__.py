"""What tests share. Imported as ``helpers``, as pytest's pythonpath is tests/; also by processes that tests start."""

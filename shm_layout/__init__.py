"""The shared-memory layout between the daemon and its clients."""

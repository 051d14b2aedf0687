"""The relay daemon of a node: control plane in Python (one event loop), data plane in C (one thread a rail)."""

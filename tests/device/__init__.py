"""Measurements on a machine with GPUs; run is the entry."""

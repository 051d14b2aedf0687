"""Tests of GPU memory: on a real GPU where there is one, else on the stand-in driver."""

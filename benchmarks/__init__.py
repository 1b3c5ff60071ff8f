"""Benchmarks: each runs as `python -m benchmarks.NAME`."""

import os

# Read when torch is loaded, so it is said here: namespaces have no host names, which is harmless.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

"""The console script `gulliver`: thin; every command is a call into the library."""

from gulliver.cli._main import main

__all__ = ["main"]

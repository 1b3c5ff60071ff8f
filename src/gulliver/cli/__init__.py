"""The console script `gulliver`; every command is a thin call into the library."""

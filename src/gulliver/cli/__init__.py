"""The console script `gulliver`: thin; every command is a call into the library."""

"""`python -m gulliver.cli`, the entry point for launchers."""

from gulliver.cli.dispatch import main

main()

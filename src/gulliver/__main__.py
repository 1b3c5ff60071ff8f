"""`python -m gulliver`: the command line."""

from gulliver.cli.dispatch import main

main()

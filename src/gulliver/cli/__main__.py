"""`python -m gulliver.cli`: what a launcher starts."""

from gulliver.cli.dispatch import main

main()

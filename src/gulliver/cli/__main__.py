"""`python -m gulliver.cli`: what a launcher starts."""

from gulliver.cli._main import main

main()

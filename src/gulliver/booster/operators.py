"""Old location of `gulliver.operators`, kept for one release."""

from gulliver.operators.plans import Program, find_operators

__all__ = ["Program", "find_operators"]

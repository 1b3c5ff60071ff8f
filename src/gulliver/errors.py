"""The one error that users see, and how it suggests what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GulliverError(ValueError):
    """A mistake that the user can mend: one line saying what is wrong and what would be right."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Ends an error message: the choice most like `name`, or the list of all choices.

    Args:
        name: what the user wrote.
        choices: what would have been accepted.

    Returns:
        A phrase such as ``did you mean 'tiny'?`` or ``choose from 'a', 'b'``.
    """
    known = sorted(set(choices))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "choose from " + ", ".join(repr(choice) for choice in known)

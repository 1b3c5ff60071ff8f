"""The one error that users see, and how it says what was meant or is missing."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

SHOWN = 32
"""Most choices that an error lists."""


class GulliverError(ValueError):
    """A user's mistake: one line says what is wrong and what would be right."""


class UsageError(GulliverError):
    """A mistake in the arguments of a command, which then exits with 2."""


class MissingExtraError(GulliverError):
    """A package that an extra of the installation has is not there."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Makes errors of the block usage errors: it checks arguments, and computes nothing."""
    try:
        yield
    except MissingExtraError:
        raise
    except GulliverError as error:
        raise UsageError(str(error)) from error


def missing_extra(what: str, extra: str) -> MissingExtraError:
    """Makes the error of a package that an extra of the installation has.

    Args:
        what: what needs which package.
        extra: name of the extra in pyproject.toml.
    """
    return MissingExtraError(
        f"{what}: pip install '.[{extra}]' in a clone of gulliver's repository"
    )


def nearest(name: str, choices: Iterable[str]) -> str:
    """Ends an error message: the choice most like `name`, or the list of choices.

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
    shown = ", ".join(repr(choice) for choice in known[:SHOWN])
    return f"choose from {shown}" + (f" and {len(known) - SHOWN} more" if known[SHOWN:] else "")


def first_difference(
    every: Sequence[Mapping[str, str]],
) -> tuple[int, str, str | None, str | None] | None:
    """Finds where something that all ranks should have alike differs from the first rank's.

    Args:
        every: values by name, of each rank.

    Returns:
        The rank, the name, the first rank's value and that rank's, None where it has none; None
        where all are alike.
    """
    first = every[0]
    for rank, other in enumerate(every):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                return rank, name, first.get(name), other.get(name)
    return None


def once_differentiable(what: str, linear: bool = False) -> Callable[[Any], Any]:
    """Declines to record a backward that cannot be differentiated; torch's lets saved tensors pass.

    Args:
        what: what it is the backward of, in terms of the user's options.
        linear: whether the backward reads nothing but the incoming gradient.
    """

    def decorate(backward: Any) -> Any:
        import torch  # late: errors are imported where torch is not

        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and (not linear or any(g.requires_grad for g in grads)):
                raise GulliverError(
                    f"create_graph=True asks for a second derivative, which {what} does not have: "
                    "leave create_graph out, or turn that option off"
                )
            return backward(ctx, *grads)

        return checked

    return decorate

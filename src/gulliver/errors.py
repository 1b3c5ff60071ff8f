"""The exceptions that users see, and helpers for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

SHOWN = 32
"""Maximum number of choices listed in an error."""


class GulliverError(ValueError):
    """Error that the user can fix; its one-line message says what is wrong and what to do."""


class UsageError(GulliverError):
    """Invalid command-line arguments; the command exits with status 2."""


class MissingExtraError(GulliverError):
    """A package of an optional extra is not installed."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Converts a `GulliverError` to `UsageError`; for blocks that only check arguments."""
    try:
        yield
    except MissingExtraError:
        raise
    except GulliverError as error:
        raise UsageError(str(error)) from error


def missing_extra(what: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"{what}: pip install '.[{extra}]' in a clone of gulliver's repository"
    )


def nearest(name: str, choices: Iterable[str]) -> str:
    """Completes an error: ``did you mean 'tiny'?`` or ``choose from 'a', 'b'``."""
    known = sorted(set(choices))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(repr(choice) for choice in known[:SHOWN])
    return f"choose from {shown}" + (f" and {len(known) - SHOWN} more" if known[SHOWN:] else "")


def check_known(what: str, name: object, choices: Collection[str]) -> None:
    """Rejects a name that is not among the choices."""
    if name not in choices:
        raise GulliverError(f"unknown {what} {name!r}: {nearest(str(name), choices)}")


def first_difference(
    every: Sequence[Mapping[str, str]],
) -> tuple[int, str, str | None, str | None] | None:
    """Finds the first value that differs from rank 0's: rank, name and both values (or None)."""
    first = every[0]
    for rank, other in enumerate(every):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                return rank, name, first.get(name), other.get(name)
    return None


def once_differentiable(what: str, linear: bool = False) -> Callable[[Any], Any]:
    """Makes a backward raise under ``create_graph``, even if only saved tensors need gradients.

    Args:
        what: the operation, in terms of the user's options.
        linear: whether the backward reads no saved tensors, only the incoming gradient.
    """

    def decorate(backward: Any) -> Any:
        import torch  # late, because this module is also imported without torch

        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled() and (not linear or any(g.requires_grad for g in grads)):
                raise GulliverError(
                    f"create_graph=True needs a second derivative, which {what} does not support; "
                    "omit create_graph, or disable that option"
                )
            return backward(ctx, *grads)

        return checked

    return decorate

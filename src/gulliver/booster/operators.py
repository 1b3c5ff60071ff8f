"""Old location of `gulliver.operators`, kept for one release."""

from gulliver._lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"gulliver.operators.plans": ["Program", "find_operators"]},
)

"""Number formats: wire formats, FP8 linear layers, int8 inference."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.int8.replace import replace_module as replace_module

__getattr__, __dir__ = lazy_exports(__name__)

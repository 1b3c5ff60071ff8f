"""Layouts of tensors on a mesh of ranks, and the cheapest conversions between them."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.layout.conversion import plan_conversion as plan_conversion
    from gulliver.layout.even import split_evenly as deal  # noqa: F401
    from gulliver.layout.even import split_evenly as split_evenly

__getattr__, __dir__ = lazy_exports(__name__)

"""Runs real jobs under the policies of `gulliver.schedule`: submission, resizing, restarts."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.schedule.live.training import elastic as elastic

__getattr__, __dir__ = lazy_exports(__name__)

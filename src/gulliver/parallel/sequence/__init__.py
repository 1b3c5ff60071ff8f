"""Sequence parallelism: attention over sequences that lie on several ranks."""

from gulliver.parallel.sequence._attention import attention
from gulliver.parallel.sequence._layout import Layout
from gulliver.parallel.sequence._mask import Mask
from gulliver.parallel.sequence._plan import SequenceGroups, SequencePlan, make_groups

__all__ = ["Layout", "Mask", "SequenceGroups", "SequencePlan", "attention", "make_groups"]

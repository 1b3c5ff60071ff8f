"""How tensors lie on a mesh of ranks, and the least-cost way from one layout to another."""

from gulliver.layout._convert import ConversionPlan, convert, plan_conversion
from gulliver.layout._even import Interval, deal, intervals
from gulliver.layout._placements import sharding_of

__all__ = [
    "ConversionPlan",
    "Interval",
    "convert",
    "deal",
    "intervals",
    "plan_conversion",
    "sharding_of",
]

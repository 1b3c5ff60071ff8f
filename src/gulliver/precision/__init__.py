"""Number formats: what travels between ranks, FP8 linears, int8 inference."""

from gulliver.precision.int8 import replace_module

__all__ = ["replace_module"]

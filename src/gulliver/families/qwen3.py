"""Qwen3: a Llama whose queries and keys are normalized head by head.

The norms' weights are whole on all tensor ranks, each of which has other heads: tensor parallelism
sees that by itself, and sums their gradients.
"""

from __future__ import annotations

from gulliver.families.llama import WINDOWED
from gulliver.families.record import Blocks, Family

QWEN3 = Family("qwen3", blocks=Blocks(), sequences=WINDOWED)

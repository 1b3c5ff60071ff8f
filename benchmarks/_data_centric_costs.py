"""Costs that planners are replayed with: the video table with its activations."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from gulliver.hardware import TableCosts
from gulliver.hardware.batch_costs import BlockKind

TABLE = Path(__file__).with_name("dcp_costs.json")
HIDDEN, LAYERS, MEMORY = 1152, 28, 50e9
"""STDiT-XL: dims and pairs of blocks; bytes of an 80-GB device for activations (0.7 of it, less
states), which the table's 110,000 tokens fill with all blocks recomputed."""
KEPT = 40 * HIDDEN
"""Bytes of a token that a kept block holds in 16 bits: 34 per dim (Korthikanti et al. 2022, without
the attention matrix), and 6 for cross attention."""


@dataclass(frozen=True)
class Parts:
    """Parts of the table's seconds, by its own formula."""

    resolutions: dict[str, list[int]]

    def __call__(self, shape: str, degree: int, batch: int) -> tuple[float, float]:
        """Seconds of messages, and of the repeated forwards (a third of three passes)."""
        tokens = self.tokens(shape) * batch
        share = tokens / degree
        sent = 28 * 4 * (share * HIDDEN * 2 * (degree - 1) / degree) / 150e9 * 3 + 28 * 8 * 30e-6
        busy = min(1.0, 0.35 + 0.65 * share / 6000)
        return (sent if degree > 1 else 0.0), tokens * 1.15e9 * 6 * 0.33 / 300e12 / degree / busy

    def tokens(self, shape: str) -> int:
        name, frames = shape.split("/")
        height, width = self.resolutions[name]
        count = 1 if frames == "1" else int(frames) // 17 * 5
        return math.ceil(height / 16) * math.ceil(width / 16) * count


def video_costs() -> TableCosts:
    """The table, with memory in bytes and two kinds of blocks that can be kept."""
    model = json.loads(TABLE.read_text(encoding="utf-8"))["cost_model"]
    kinds = tuple(BlockKind(name, LAYERS, KEPT, 0.5) for name in ("spatial", "temporal"))
    token = MEMORY / model["cap_tokens_per_gpu"]
    parts = Parts(model["resolutions"])
    return TableCosts.load(
        TABLE, token_bytes=token, memory=MEMORY, kinds=kinds, parts=parts, model="STDiT3 1.1B"
    )

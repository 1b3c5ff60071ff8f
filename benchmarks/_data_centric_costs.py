"""Costs that planners are replayed with: the video table with its activations, and a text model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gulliver.hardware import Cluster, SampleCosts, SampleShape, TableCosts, described
from gulliver.hardware.batch_costs import BlockKind
from gulliver.hardware.samples import SampleFit, SampleModel

TABLE = Path(__file__).with_name("dcp_costs.json")
HIDDEN, LAYERS, MEMORY = 1152, 28, 50e9
"""STDiT-XL: dims and pairs of blocks; bytes of an 80-GB device for activations (0.7 of it, less
states), which the table's 110,000 tokens fill with all blocks recomputed."""
KEPT = 40 * HIDDEN
"""Bytes of a token that a kept block holds in 16 bits: 34 per dim (Korthikanti et al. 2022, without
the attention matrix), and 6 for cross attention."""


@dataclass(frozen=True)
class Parts:
    """What the table's seconds consist of, by its own formula."""

    resolutions: dict[str, list[int]]

    def __call__(self, shape: str, degree: int, batch: int) -> tuple[float, float]:
        """Seconds of messages, and of the repeated forwards (a third of three passes)."""
        tokens = self.tokens(shape) * batch
        share = tokens / degree
        sent = 28 * 4 * (share * HIDDEN * 2 * (degree - 1) / degree) / 150e9 * 3 + 28 * 8 * 30e-6
        busy = min(1.0, 0.35 + 0.65 * share / 6000)
        return (sent if degree > 1 else 0.0), tokens * 1.15e9 * 6 * 0.33 / 300e12 / degree / busy

    def tokens(self, shape: str) -> int:
        """Tokens of a sample."""
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


def text_costs(ranks: int) -> SampleCosts:
    """An 8B language model on H100s: 450 TFLOP/s, 50 GB for states and activations."""
    model = SampleModel(
        "8B", 218_000_000, 4096, (BlockKind("decoder", 32, 34 * 4096.0),), "bfloat16"
    )
    fit = SampleFit(0.03, 2e-4, 1 / 450e12, 4e-9, 0.0, 16e9, 60_000.0, 2 * 4096.0)
    return SampleCosts(model, fit, 66e9, cluster(ranks), tuple(2**n for n in range(6)))


def cluster(ranks: int) -> Cluster:
    """Nodes of eight H100s."""
    return described("8xh100-infiniband").resized(ranks)


@dataclass(frozen=True)
class Documents:
    """Documents of long-tailed lengths.

    Attributes:
        count: number of them.
        longest: most tokens of one.
        seed: seed of the draws.
    """

    count: int
    longest: int = 131_072
    seed: int = 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each: log-normal with a median of 800, at least 16."""
        draw = np.random.Generator(np.random.Philox(key=self.seed))
        found = np.exp(draw.normal(np.log(800), 1.4, self.count))
        return np.clip(found, 16, self.longest).astype(np.int64)

    @cached_property
    def shapes(self) -> list[SampleShape]:
        """Classes of lengths, an eighth of an octave wide; a document counts as its class's end."""
        ends = 16 * 2 ** (np.ceil(8 * np.log2(self.lengths / 16)) / 8)
        known = {int(end): SampleShape.document(int(end)) for end in np.unique(np.ceil(ends))}
        return [known[int(end)] for end in np.ceil(ends)]

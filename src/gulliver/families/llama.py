"""Llama, Mistral and Qwen2: decoders with rotary positions and a plan for their own tensors.

Their blocks are their longest list, and return a plain hidden state. Attention takes what
sequence parallelism gives it, windows included, where the type has them.
"""

from __future__ import annotations

from gulliver.families.record import Blocks, Family, Sequences

DECODER = Sequences(causal=True, masks=("causal", "padding", "documents"), by_positions=True)
WINDOWED = Sequences(
    causal=True, masks=("causal", "window", "padding", "documents"), by_positions=True
)

LLAMA = Family("llama", blocks=Blocks(), sequences=DECODER)
MISTRAL = Family("mistral", blocks=Blocks(), sequences=WINDOWED)
QWEN2 = Family("qwen2", blocks=Blocks(), sequences=WINDOWED)

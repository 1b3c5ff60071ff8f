"""Mixtral: a Mistral with a mixture of experts in each block.

[Note: experts] The weights of a layer's experts are one tensor, ``[experts, out, in]``. The tensor
axis cuts the features inside of every expert, so that all ranks work alike however tokens are
routed; routers are small, and whole. Each rank's experts then need all tokens, so the modes that
leave a rank some of them between blocks (`split_gather`, `ring`) are not for them. Where sequences
have ranks of their own, a token's rank has its experts too, and nothing of them travels.

The load-balancing loss is no sum over tokens: it multiplies two means over all of them. So routers'
logits, which are few, are brought together, and each rank computes the loss of the whole.
"""

from __future__ import annotations

from dataclasses import replace

from gulliver.families.llama import WINDOWED
from gulliver.families.record import SHARED_BY_SEQUENCE, Blocks, Experts, Family

MIXTRAL = Family(
    "mixtral",
    blocks=Blocks(),
    sequences=replace(
        WINDOWED,
        modes=SHARED_BY_SEQUENCE,
        why="its experts are cut over the tensor axis, and need all tokens",
    ),
    experts=Experts(),
)

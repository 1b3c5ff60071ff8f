"""OPT: positions are counted in the padding mask, and two modules run after the blocks."""

from __future__ import annotations

from torch import Tensor

from gulliver.families.record import Blocks, Family, Sequences, Tensors

SEPARATE = {f"{name}_proj": "column by heads" for name in ("q", "k", "v")}
FC = {"fc1": "column", "fc2": "row"}


def _counted(mask: Tensor) -> Tensor:
    """Positions: how many tokens of the row were no padding."""
    return (mask.long().cumsum(1) * mask - 1).long()


OPT = Family(
    "opt",
    tensors=Tensors(
        {
            **SEPARATE,
            **FC,
            "out_proj": "row by heads",
            "embed_tokens": "vocabulary",
            "embed_positions": "replicate",
            "project_in": "replicate",
            "project_out": "replicate",
            "lm_head": "head",
            "score": "replicate",
            "qa_outputs": "replicate",
        }
    ),
    blocks=Blocks(after=("final_layer_norm", "project_out")),
    sequences=Sequences(
        causal=True,
        masks=("causal", "padding"),
        positions=_counted,
        dropouts=("attention_dropout", "dropout", "layerdrop"),
    ),
)

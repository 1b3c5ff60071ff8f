"""The ways in which a module can be cut, by name, and the names that others have for them.

Data, no code. Which module of which model is cut how stands in its family's record
(`gulliver.families.Tensors`), whose styles are those of `STYLES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "column",
    "row",
    "vocabulary",
    "embedding",
    "experts",
    "parameters",
    "latent",
    "summed",
    "replicate",
]


@dataclass(frozen=True)
class How:
    """How a module is cut."""

    # Outputs (column), inputs (row), rows of an embedding (vocabulary) or its columns (embedding);
    # features inside of all experts of a module (experts); parameters of an attention by their
    # heads (parameters); whole on all ranks (replicate), with gradients that are partial because
    # each rank has other heads (summed), or of whose output the rotary part goes to heads as it is
    # (latent).
    kind: Kind
    heads: bool = False  # Heads are not cut, and query heads go where their key-value head goes
    # Number of blocks that are dealt alike, one after the other: 3 for ``[q; k; v]``.
    blocks: int = 1
    gather: bool = False  # The output is whole on all ranks
    split: bool = False  # The input is whole on all ranks


STYLES: dict[str, How] = {
    "column": How("column"),
    "column, gathered": How("column", gather=True),
    "column, packed": How("column", blocks=2),
    "column by heads": How("column", heads=True),
    "q; k; v by heads": How("column", heads=True, blocks=3),
    "k; v by heads": How("column", heads=True, blocks=2),
    "row": How("row"),
    "row by heads": How("row", heads=True),
    "row, split": How("row", split=True),
    "vocabulary": How("vocabulary"),
    "head": How("column", gather=True),
    "embedding, gathered": How("embedding", gather=True),
    "embedding by heads": How("embedding", heads=True),
    "experts": How("experts"),
    "parameters by heads": How("parameters"),
    "latent": How("latent"),
    "summed": How("summed"),
    "replicate": How("replicate"),
}

HUGGING_FACE: dict[str, str] = {
    "colwise": "column",
    "colwise_gather_output": "column, gathered",
    "colwise_rep": "column, gathered",
    "packed_colwise": "column, packed",
    "rowwise": "row",
    "rowwise_split_input": "row, split",
    "rowwise_rep": "row, split",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "embedding, gathered",
    "replicated_with_grad_allreduce": "summed",
    "sequence_parallel": "replicate",
    "replicate": "replicate",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "latent",
    "local_params": "parameters by heads",
}
"""Names in a model's own plan; columns and rows of attention go by heads. Others are refused."""


GATHERED = {"column": "column, gathered", "row": "row, split"}
"""Kind to the style that is exact whatever is between columns and rows."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
"""Attributes in which attention modules count their heads."""

SCALED = (*KV_HEADS, *HEADS, "split_size", "inner_dim", "all_head_size", "embed_dim")
"""Attributes of attention modules that a rank has its heads' part of."""

REPEATED = "num_key_value_groups"
"""Attribute of attention modules: query heads of each key-value head."""

HIDDEN = ("hidden_states",)
"""Names of a module's input, where it is not its first argument."""

DRAWN_ALIKE = ("y_embedder",)
"""Modules that draw at random but outside of what is cut, once for each sample."""

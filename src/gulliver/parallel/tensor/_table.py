"""What is known of models: how each kind of module is cut, by model type.

Data, no code. A pattern names a module by the last parts of its path, ``*`` standing for one part;
the longest pattern that fits decides. How a module is cut is one of `STYLES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """How a module is cut.

    Attributes:
        kind: outputs (column), inputs (row), rows of an embedding (vocabulary) or its columns
            (embedding); features inside of all experts of a module (experts); parameters of an
            attention by their heads (parameters); whole on all ranks (replicate), with gradients
            that are partial because each rank has other heads (summed), or of whose output the
            rotary part goes to heads as it is (latent).
        heads: heads are not cut, and query heads go where their key-value head goes.
        blocks: that are dealt alike, one after the other: 3 for ``[q; k; v]``.
        gather: the output is whole on all ranks.
        split: the input is whole on all ranks.
    """

    kind: Kind
    heads: bool = False
    blocks: int = 1
    gather: bool = False
    split: bool = False


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


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        rules: pattern to style.
        sliced: arguments of which a rank takes its heads' part: pattern of the module to names of
            arguments, whose dim 0 is batch x heads.
        rest: what no rule names is cut in the way that is exact for any module.
        own: the model's own plan holds where no rule does.
    """

    rules: Mapping[str, str]
    sliced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rest: bool = False
    own: bool = False


_SEPARATE = {f"{name}_proj": "column by heads" for name in ("q", "k", "v")}
_FC = {"fc1": "column", "fc2": "row"}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        {
            "attn.c_attn": "q; k; v by heads",
            "attn.c_proj": "row by heads",
            "crossattention.q_attn": "column by heads",
            "crossattention.c_attn": "k; v by heads",
            "crossattention.c_proj": "row by heads",
            "mlp.c_fc": "column",
            "mlp.c_proj": "row",
            "wte": "vocabulary",
            "wpe": "replicate",
            "lm_head": "head",
            "score": "replicate",
            "classifier": "replicate",
        }
    ),
    "bloom": Family(
        {
            # Each head's q, k and v lie together, so that heads are cut as of one projection.
            "self_attention.query_key_value": "column by heads",
            "self_attention.dense": "row by heads",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
            "word_embeddings": "vocabulary",
            "lm_head": "head",
            "score": "replicate",
            "classifier": "replicate",
        },
        sliced={"self_attention": ("alibi",)},
    ),
    "opt": Family(
        {
            **_SEPARATE,
            **_FC,
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
    "t5": Family(
        {
            **{
                f"{attention}.{name}": "column by heads"
                for attention in ("SelfAttention", "EncDecAttention")
                for name in "qkv"
            },
            "SelfAttention.o": "row by heads",
            "EncDecAttention.o": "row by heads",
            "relative_attention_bias": "embedding by heads",
            "DenseReluDense.wi": "column",
            "DenseReluDense.wi_0": "column",
            "DenseReluDense.wi_1": "column",
            "DenseReluDense.wo": "row",
            "shared": "vocabulary",
            "embed_tokens": "vocabulary",
            "lm_head": "head",
        }
    ),
    "bert": Family(
        {
            "self.query": "column by heads",
            "self.key": "column by heads",
            "self.value": "column by heads",
            "attention.output.dense": "row by heads",
            "crossattention.output.dense": "row by heads",
            "intermediate.dense": "column",
            "output.dense": "row",
            "word_embeddings": "vocabulary",
            "position_embeddings": "replicate",
            "token_type_embeddings": "replicate",
            "pooler.dense": "replicate",
            "transform.dense": "replicate",
            "predictions.decoder": "head",
            "seq_relationship": "replicate",
            "classifier": "replicate",
            "qa_outputs": "replicate",
        }
    ),
    "vit": Family(
        {
            **_SEPARATE,
            "attention.o_proj": "row by heads",
            "mlp.fc1": "column",
            "mlp.fc2": "row",
            "embeddings": "replicate",
            "projection": "replicate",
            "pooler.dense": "replicate",
            "classifier": "replicate",
        }
    ),
    "whisper": Family(
        {
            **_SEPARATE,
            **_FC,
            "out_proj": "row by heads",
            "conv1": "replicate",
            "conv2": "replicate",
            "embed_positions": "replicate",
            "embed_tokens": "vocabulary",
            "proj_out": "head",
        }
    ),
    "STDiT3": Family(
        {
            "attn.qkv": "q; k; v by heads",
            "attn.q_norm": "summed",
            "attn.k_norm": "summed",
            "attn.proj": "row by heads",
            "cross_attn.q_linear": "column by heads",
            "cross_attn.kv_linear": "k; v by heads",
            "cross_attn.proj": "row by heads",
            "mlp.fc1": "column",
            "mlp.fc2": "row",
            # What sees no tokens is small, and the same on all ranks.
            "x_embedder.proj": "replicate",
            "t_embedder.mlp.*": "replicate",
            "fps_embedder.mlp.*": "replicate",
            "t_block.*": "replicate",
            "y_proj.fc1": "replicate",
            "y_proj.fc2": "replicate",
            "rope": "replicate",
            "spatial_blocks.*": "replicate",
            "temporal_blocks.*": "replicate",
            "final_layer": "replicate",
            "final_layer.linear": "replicate",
        }
    ),
}

GATHERED = {"column": "column, gathered", "row": "row, split"}
"""Kind to the style that is exact whatever is between columns and rows."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
"""Attributes in which attention modules count their heads."""

SCALED = (*KV_HEADS, *HEADS, "split_size", "inner_dim", "all_head_size", "embed_dim")
"""Attributes of attention modules that a rank has its heads' part of."""

HIDDEN = ("hidden_states",)
"""Names of a module's input, where it is not its first argument."""

DRAWN_ALIKE = ("y_embedder",)
"""Modules that draw at random but outside of what is cut, once for each sample."""

"""STDiT3, the video model: spatial and temporal blocks in turns, modes of its own for clips."""

from __future__ import annotations

from gulliver.families.record import SHARED_BY_SEQUENCE, Blocks, Family, Sequences, Tensors

STDIT3 = Family(
    "STDiT3",
    classes=("STDiT3",),
    tensors=Tensors(
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
            "x_embedder_cond.proj": "replicate",
            "x_embedder_cond_mask.proj": "replicate",
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
    blocks=Blocks(
        lists=("spatial_blocks", "temporal_blocks"),
        interleaved=True,
        everywhere=("t_embedder", "fps_embedder", "t_block", "y_embedder", "rope"),
    ),
    sequences=Sequences(
        SHARED_BY_SEQUENCE,
        why="its tokens are cut by frames or by spatial positions, by its own sequence modes",
    ),
)

"""Whisper: an encoder of sound, whose tokens come from convolutions, and a decoder of text."""

from __future__ import annotations

from gulliver.families.opt import FC, SEPARATE
from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences, Tensors

WHISPER = Family(
    "whisper",
    tensors=Tensors(
        {
            **SEPARATE,
            **FC,
            "out_proj": "row by heads",
            "conv1": "replicate",
            "conv2": "replicate",
            "embed_positions": "replicate",
            "embed_tokens": "vocabulary",
            "proj_out": "head",
        }
    ),
    blocks=Blocks(lists=("encoder.layers", "decoder.layers")),
    sequences=Sequences(SHARED_BY_TENSOR, masks=(), why="its encoder makes tokens by convolution"),
)

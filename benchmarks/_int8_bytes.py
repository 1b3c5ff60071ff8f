"""Bytes of models that no machine here holds, counted on meta."""

from __future__ import annotations

from typing import Any

import torch

import gulliver
from benchmarks._harness import Report, at_most
from gulliver.comm.groups import RankGroup
from gulliver.parallel.tensor import apply_tensor, plan_tensor
from gulliver.precision.int8.replace import model_bytes

CARDS = 8
GB = 1e9


def bloom_bytes(report: Report) -> None:
    """BLOOM-176B as it is public: of each of eight cards, and in all."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112)
    found = []
    # Heads, widths and the vocabulary divide by 8: all cards hold alike, as the ends show.
    for card in (0, CARDS - 1):
        with torch.device("meta"):
            made: Any = BloomForCausalLM(config)
            model = made.to(torch.bfloat16)
        whole = model_bytes(model)
        apply_tensor(model, plan_tensor(model, CARDS), RankGroup(tuple(range(CARDS)), card, None))
        gulliver.replace_module(model)
        found.append(model_bytes(model))
    most = max(found) / GB
    total = CARDS * most
    report.rows.append(
        ("BLOOM-176B on 8 cards, GB", f"{whole / GB:.1f} (bf16)", f"{total:.1f}", "", "")
    )
    report.figures |= {"BLOOM bf16 GB": whole / GB, "BLOOM int8 GB": total, "GB per card": most}
    report.bars.append(at_most("BLOOM-176B, GB on the fullest of 8 cards", most, 23.2))
    report.bars.append(at_most("BLOOM-176B, GB in all", total, 185.6))


def unet_bytes(report: Report) -> None:
    """Bytes of the UNet of Stable Diffusion 2, without its values."""
    from diffusers import UNet2DConditionModel  # pyright: ignore[reportPrivateImportUsage]

    with torch.device("meta"):
        made: Any = UNet2DConditionModel(
            sample_size=96,
            cross_attention_dim=1024,
            attention_head_dim=(5, 10, 20, 20),  # pyright: ignore[reportArgumentType]
            use_linear_projection=True,
        )
        model = made.to(torch.float16).eval()
    before = model_bytes(model)
    gulliver.replace_module(model)
    after = model_bytes(model)
    cells = f"{before / GB:.3f} (fp16)", f"{after / GB:.3f}", f"{before / after:.2f}", ""
    report.rows.append(("UNet of Stable Diffusion 2, GB", *cells))
    report.figures |= {"UNet fp16 GB": before / GB, "UNet int8 GB": after / GB}
    report.bars.append(at_most("UNet of Stable Diffusion 2, GB", after / GB, 3.1))

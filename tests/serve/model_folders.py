"""Folders whose files hold other tensors than the models that are loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16


def with_scales(model: Any, folder: Path, exact: Path) -> None:
    """Writes a model in block-scaled FP8, and in another folder the values it stands for."""
    model.save_pretrained(folder)
    model.save_pretrained(exact)
    plain, scaled = load_file(folder / "model.safetensors"), {}
    for name, value in list(plain.items()):
        if ".layers." not in name or value.dim() != 2:
            continue
        rows, columns = value.shape
        high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
        padded = torch.zeros(high * BLOCK, wide * BLOCK)
        padded[:rows, :columns] = value
        blocks = padded.view(high, BLOCK, wide, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        held = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        plain[name] = (held.float() * scale[:, None, :, None]).view_as(padded)[:rows, :columns]
        plain[name] = plain[name].contiguous()
        scaled[name] = held.view(padded.shape)[:rows, :columns].contiguous()
        scaled[f"{name}_scale_inv"] = scale
    save_file(plain, exact / "model.safetensors", {"format": "pt"})
    save_file(plain | scaled, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    block = [BLOCK, BLOCK]
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps(config))

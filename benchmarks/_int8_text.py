"""A small byte-level language model, trained on the installed Python sources."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._models import llama

LENGTH, BATCH, BYTES = 128, 16, 2_000_000


def trained(steps: int) -> tuple[Any, Tensor, Tensor]:
    """Returns the model, ids that it was trained on, and those of a text that it was not."""
    torch.manual_seed(0)
    model = llama(256, 256, 688, 4, 4)
    learned, held_out = _texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(learned) - LENGTH, (BATCH,))
        rows = torch.stack([learned[at : at + LENGTH] for at in starts.tolist()])
        loss: Any = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), learned, held_out


@torch.no_grad()
def divergence(model: Any, other: Any, tokens: Tensor, length: int = 256) -> float:
    """Nats by which another model's predictions of a text are away from a model's, in the mean."""
    found = []
    for rows in tokens[: len(tokens) // length * length].view(-1, 4, length):
        mine, theirs = (m(rows).logits.float().log_softmax(-1) for m in (model, other))
        found.append(float((mine.exp() * (mine - theirs)).sum(-1).mean()))
    return sum(found) / len(found)


def sources() -> list[Path]:
    """Files of Python's own library, its tests and what is installed beside it left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list[Path]()
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "test", "tests", "lib2to3"}:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found.append(path)
    return found


def _texts() -> tuple[Tensor, Tensor]:
    files = sources()
    random.Random(0).shuffle(files)
    text = b"\n".join(path.read_bytes() for path in files[:200])[: BYTES + 32768]
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return ids[:-32768], ids[-32768:]

"""Trains the judges of the moving digits and stores them in the package."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import gulliver.video.digits
from gulliver.data.clips import Bucket
from gulliver.jobs.log import derive
from gulliver.video.digits import DigitReader, MovingDigits, windows_around_ink

STEPS, BATCH = 500, 64


def train_reader() -> DigitReader:
    """Trains the reader on real clips of the training handwriting (takes half a minute)."""
    torch.manual_seed(derive(0, 20))
    dataset = MovingDigits("train", STEPS * BATCH, derive(0, 21), {Bucket(5, 32, 32): 1})
    reader = DigitReader()
    optimizer = torch.optim.Adam(reader.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        indices = list(range(step * BATCH, (step + 1) * BATCH))
        read = [dataset.labels(i)[0] for i in indices]
        windows, _ = windows_around_ink(dataset.batch(indices)[:, :, [0, -1]])
        # Augmented with faint noise and small shifts, so that blurred clips are recognized as
        # people would.
        windows = windows + 0.1 * torch.randn_like(windows)
        windows = windows.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (-2, -1))
        targets = torch.tensor(read).repeat_interleave(2)
        loss = F.cross_entropy(reader(windows), targets, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return reader


if __name__ == "__main__":
    weights = {name: value.half() for name, value in train_reader().state_dict().items()}
    save_file(weights, Path(gulliver.video.digits.__file__).with_name("judges.safetensors"))

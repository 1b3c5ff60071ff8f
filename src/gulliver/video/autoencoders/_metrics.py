"""How near decoded clips are to their originals: PSNR and SSIM, on held-out clips.

Pixels are in [-1, 1] and clamped, as they are shown; figures are of pixels in [0, 1].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.comm import all_reduce
from gulliver.data import collate
from gulliver.models import VideoAutoencoder
from gulliver.video._autoencoder_config import WINDOW

DEVIATION = 1.5
"""Standard deviation of SSIM's Gaussian window, in pixels."""
K1, K2 = 0.01, 0.03
MOST_CLIPS = 256
"""Most clips that a report is measured on."""


class Quality(NamedTuple):
    """Figures of held-out clips."""

    # Peak signal-to-noise ratio in dB, of the mean squared error of the clips.
    psnr: float
    # Mean structural similarity of all frames; NaN where frames are smaller than its window.
    ssim: float


def psnr(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the peak signal-to-noise ratio of each frame, [B, T] in dB."""
    return -10 * squared_error(video, decoded).mean(dim=(1, 3, 4)).log10()


def squared_error(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the squared error of pixels in [0, 1], of each element."""
    return ((decoded.clamp(-1, 1) - video) / 2).square()


def ssim(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the structural similarity of each frame, [B, T] (Wang et al. 2004).

    Local means, variances and covariance are those of a Gaussian window of 11 x 11 pixels, where it
    lies within the frame; the channels' similarities are averaged.

    Args:
        video: clips [B, 3, T, H, W] in [-1, 1].
        decoded: clips to compare with them.
    """
    x = _frames((video.clamp(-1, 1) + 1) / 2)
    y = _frames((decoded.clamp(-1, 1) + 1) / 2)
    mean_x, mean_y, xx, yy, xy = (_blurred(part) for part in (x, y, x * x, y * y, x * y))
    variance_x, variance_y = xx - mean_x.square(), yy - mean_y.square()
    covariance = xy - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    batch, frames = video.shape[0], video.shape[2]
    return (luminance * structure).mean(dim=(1, 2, 3)).view(batch, frames)


def _frames(video: Tensor) -> Tensor:
    """Returns the frames of all clips, [B * T, 3, H, W]."""
    return video.transpose(1, 2).flatten(0, 1)


def _blurred(frames: Tensor) -> Tensor:
    """Averages under the window, rows and columns apart: it is a product of two."""
    distances = torch.arange(WINDOW, dtype=frames.dtype, device=frames.device) - WINDOW // 2
    weights = torch.exp(-distances.square() / (2 * DEVIATION**2))
    kernel = (weights / weights.sum()).expand(frames.shape[1], 1, 1, -1)
    rows = F.conv2d(frames, kernel, groups=frames.shape[1])
    return F.conv2d(rows, kernel.transpose(2, 3), groups=frames.shape[1])


@torch.no_grad()
def measure(
    model: VideoAutoencoder,
    dataset: Any,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Quality:
    """Measures how near an autoencoder's clips are to the originals; every rank calls it."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    dtype = next(model.parameters()).dtype
    for index in range(share[0], min(MOST_CLIPS, len(dataset)), share[1]):
        # Where samples are dealt to buckets anew in each epoch, some are left out of the first.
        known = dataset.bucket_of(index) is not None
        videos = collate(dataset, [index]).videos if known else None
        if videos is None:
            continue
        videos = videos.to(device, dtype)
        decoded = model.decode(model.encode(videos))
        similar = ssim(videos, decoded) if min(videos.shape[3:]) >= WINDOW else videos.new_zeros(0)
        error = float(squared_error(videos, decoded).mean())
        found = (error, 1.0, float(similar.sum()), float(similar.numel()))
        sums += torch.tensor(found, dtype=torch.float64, device=device)
    if share[1] > 1:
        all_reduce(sums)
    error, clips, similar, frames = sums.tolist()
    # All of these few may have gone since.
    mean = error / clips if clips else math.nan
    return Quality(
        -10 * math.log10(mean) if mean else math.inf, similar / frames if frames else math.nan
    )

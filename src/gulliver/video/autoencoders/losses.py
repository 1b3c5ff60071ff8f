"""Loss terms, metrics and discriminator of video autoencoders; terms are means over elements.

    reconstruction   e = |x - y| or (x - y)^2, plus weight * perceptual
                     with a learned log-variance s: e / exp(s) + s (Kingma & Welling 2014)
    posterior        KL(N(m, v) || N(0, 1)) = (m^2 + v - 1 - log v) / 2
    perceptual       squared distance of network features, normalized at each position
                     (Zhang et al. 2018, without its learned weights)
    adversarial      hinge (Lim & Ye 2017), its weight adapted to the reconstruction's gradient at
                     the decoder's last layer (Esser et al. 2021)

Videos are [B, 3, T, H, W] in [-1, 1].
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gulliver.comm.collectives import all_reduce
from gulliver.data.clips import Bucket, collate
from gulliver.errors import GulliverError
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.video.autoencoder_config import WINDOW, AutoencoderLossConfig

Features = Callable[[Tensor], Tensor | Sequence[Tensor]]
"""A perceptual network: maps clips to features [N, C, ...] of one or several layers."""
LARGEST_ADAPTIVE = 1e4
SMALLEST_NORM = 1e-4
"""Added to the norm by which the adaptive weight is divided."""
LOG_VARIANCES = (-30.0, 20.0)
"""Range to which a posterior's log-variance is clamped, as in published autoencoders."""


class Posterior(NamedTuple):
    """Gaussian over latents [B, C, T, H, W]; a point estimate if `log_variance` is None."""

    mean: Tensor
    log_variance: Tensor | None

    @staticmethod
    def of(moments: Tensor, channels: int) -> Posterior:
        if moments.shape[1] == channels:
            return Posterior(moments, None)
        mean, log_variance = moments.chunk(2, dim=1)
        return Posterior(mean, log_variance.clamp(*LOG_VARIANCES))

    def sample(self, noise: Tensor, spread: float) -> Tensor:
        """Samples latents; `spread` is the standard deviation if there is no log-variance."""
        if self.log_variance is None:
            return self.mean + spread * noise
        return self.mean + torch.exp(0.5 * self.log_variance) * noise


class Terms(NamedTuple):
    """Scalar loss terms."""

    # Pixel and feature error, or its negative log-likelihood.
    reconstruction: Tensor
    # Weighted latent term.
    regularisation: Tensor
    # Unweighted terms by name, for logging.
    figures: dict[str, Tensor]


class AutoencoderLoss(nn.Module):
    """Reconstruction, perceptual and latent terms; its log-variance is trained with the model."""

    def __init__(self, config: AutoencoderLossConfig, perceptual: Features | None = None) -> None:
        super().__init__()
        self.config = config
        # In a tuple: its weights are neither trained nor saved.
        self._perceptual = (perceptual,)
        if config.learnt_variance:
            self.log_variance = nn.Parameter(torch.zeros(1))

    def forward(
        self, video: Tensor, decoded: Tensor, posterior: Posterior, replicas: int = 1
    ) -> Terms:
        error = pixel_error(video, decoded, self.config.reconstruction)
        figures = {self.config.reconstruction: error.detach()}
        network = self._perceptual[0]
        if network is not None:
            distance = perceptual_distance(network, video, decoded)
            figures["perceptual"] = distance.detach()
            error = error + self.config.perceptual_weight * distance
        if self.config.learnt_variance:
            variance = _share_of_gradient(self.log_variance, replicas).squeeze()
            error = error * torch.exp(-variance) + variance
            figures["log_variance"] = variance.detach()
        latents = self._latent_term(posterior, figures)
        return Terms(error, latents, figures)

    def _latent_term(self, posterior: Posterior, figures: dict[str, Tensor]) -> Tensor:
        if posterior.log_variance is None:
            return self.config.latent_pull * posterior.mean.square().mean()
        divergence = kl_divergence(posterior)
        figures["kl"] = divergence.detach()
        return self.config.kl * divergence


def _share_of_gradient(value: Tensor, replicas: int) -> Tensor:
    """Returns the value, with a gradient that is correct once summed over all replicas."""
    return value if replicas == 1 else value / replicas + (value - value / replicas).detach()


def pixel_error(video: Tensor, decoded: Tensor, kind: Literal["mse", "l1"] = "mse") -> Tensor:
    return F.mse_loss(decoded, video) if kind == "mse" else F.l1_loss(decoded, video)


def kl_divergence(posterior: Posterior) -> Tensor:
    """Computes the KL divergence to a standard normal, as a mean over latent elements."""
    mean, log_variance = posterior
    assert log_variance is not None, "a point has no divergence"
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()


def perceptual_distance(network: Features, video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the mean distance of network features; gradients flow only to `decoded`.

    Each position's feature vector (dim 1) is scaled to unit length; squared distances are averaged
    over positions, and over layers.
    """
    with torch.no_grad():
        wanted = _layers(network(video))
    found = _layers(network(decoded))
    distances = [
        (F.normalize(one, dim=1) - F.normalize(other, dim=1)).square().sum(dim=1).mean()
        for one, other in zip(found, wanted, strict=True)
    ]
    return torch.stack(distances).mean()


def _layers(features: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [features] if isinstance(features, Tensor) else list(features)


def discriminator_loss(real: Tensor, made: Tensor) -> Tensor:
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + made).mean())


def generator_loss(made: Tensor) -> Tensor:
    return -made.mean()


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor) -> Tensor:
    """Computes the weight that equalizes the norms of both terms' gradients at the last layer."""
    weight = reconstruction.norm() / (adversarial.norm() + SMALLEST_NORM)
    return weight.clamp(max=LARGEST_ADAPTIVE).detach()


def load_perceptual(place: str, device: torch.device) -> Features:
    """Imports a perceptual network: a function of clips, a module, or a class to instantiate."""
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(import_module(module), name, None)
        network: Any = found() if isinstance(found, type) else found
    except Exception as error:
        raise GulliverError(f"--loss.perceptual {place}: {_first_line(error)}") from error
    if not callable(network):
        raise GulliverError(
            f"--loss.perceptual {place}: {module} has no function, module or class {name!r}"
        )
    if isinstance(network, nn.Module):
        network = network.to(device).eval().requires_grad_(False)
    return cast(Features, network)


def check_perceptual(
    network: Features,
    buckets: Iterable[Bucket],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raises an error for a network that does not accept these clip shapes or has no gradient."""
    for bucket in sorted(set(buckets)):
        sizes = (bucket.frames, bucket.height, bucket.width)
        clip = torch.zeros(1, 3, *sizes, device=device, dtype=dtype).requires_grad_()
        try:
            found = _layers(network(clip))
            usable = bool(found) and all(one.dim() > 1 and one.requires_grad for one in found)
            problem = "it must return one or several tensors [N, C, ...] with a gradient"
        except Exception as error:
            usable, problem = False, _first_line(error)
        if not usable:
            raise GulliverError(
                f"--loss.perceptual: the network does not accept a clip of {bucket}: {problem}"
            )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


# Reconstruction quality on held-out clips: PSNR and SSIM.
#
# Pixels are clamped to [-1, 1], as for display; metrics use pixels in [0, 1].


DEVIATION = 1.5
"""Standard deviation of SSIM's Gaussian window, in pixels."""
K1, K2 = 0.01, 0.03
MOST_CLIPS = 256
"""Maximum number of clips per report."""


class Quality(NamedTuple):
    """Metrics of held-out clips."""

    # Peak signal-to-noise ratio in dB, from the mean squared error of all clips.
    psnr: float
    # Mean structural similarity of all frames; NaN if frames are smaller than its window.
    ssim: float


def psnr(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the peak signal-to-noise ratio of each frame, [B, T] in dB."""
    return -10 * squared_error(video, decoded).mean(dim=(1, 3, 4)).log10()


def squared_error(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the elementwise squared error of pixels scaled to [0, 1]."""
    return ((decoded.clamp(-1, 1) - video) / 2).square()


def ssim(video: Tensor, decoded: Tensor) -> Tensor:
    """Computes the structural similarity of each frame, [B, T] (Wang et al. 2004).

    The window has 11 x 11 pixels; only positions where it is inside the frame count. Similarities
    are averaged over channels.
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
    return video.transpose(1, 2).flatten(0, 1)


def _blurred(frames: Tensor) -> Tensor:
    """Applies the Gaussian window, which is separable, to rows and then to columns."""
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
    """Measures reconstruction quality; called on every rank."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    dtype = next(model.parameters()).dtype
    for index in range(share[0], min(MOST_CLIPS, len(dataset)), share[1]):
        # If each epoch assigns samples to buckets again, the first epoch lacks some.
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
    # These few clips may all have been deleted since.
    mean = error / clips if clips else math.nan
    return Quality(
        -10 * math.log10(mean) if mean else math.inf, similar / frames if frames else math.nan
    )


# A patch discriminator for videos: a logit for each patch of space and time.
#
# Convolutions of 3 x 4 x 4 with stride 2 halve rows and columns, and also frames except in the
# first layer (pix2pix's discriminator with an additional dim; Isola et al. 2017). Norms are per
# sample, so that logits do not depend on the batch or the number of ranks.


LAYERS = 3
GROUPS = 8


class PatchDiscriminator(nn.Module):
    """Maps clips [B, 3, T, H, W] to logits [B, 1, t, H / 8, W / 8]; T >= 1, H and W >= 8."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number in range(LAYERS):
            out = width * 2**number
            stride = (1 if number == 0 else 2, 2, 2)
            layers.append(nn.Conv3d(channels, out, (3, 4, 4), stride, padding=1))
            if number:
                layers.append(nn.GroupNorm(GROUPS, out))
            layers.append(nn.LeakyReLU(0.2))
            channels = out
        layers.append(nn.Conv3d(channels, 1, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, video: Tensor) -> Tensor:
        return self.layers(video)

    def frozen(self, video: Tensor) -> Tensor:
        """Computes logits with frozen weights: gradients flow only to the clip."""
        constants = {name: value.detach() for name, value in self.named_parameters()}
        return functional_call(self, constants, (video,))

"""How each public transformer is sampled: its diffusion, what it is told of a clip, its texts.

A sampler calls every model alike: ``denoiser(x, timestep, **inputs)`` with latents
[B, C, T, H, W] and levels from 0 to 1000. `Denoiser` hands an STDiT what its forward takes;
`PackedDenoiser` packs latents to the tokens of an MMDiT, and turns its velocity, which leads to the
noise, round. `Release` says the rest in a table.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.data import Bucket
from gulliver.models import MMDiT, pack_latents, places_of, unpack_latents
from gulliver.video._iddpm import IDDPM
from gulliver.video._rectified_flow import RectifiedFlow

FPS_OF_PICTURES = 120.0
"""Frame rate that the public models are told of a single picture."""
GUIDED = 3
"""Channels that guidance leads in the public configurations of 1.0 and 1.1."""


Flow = RectifiedFlow | IDDPM


# [Note: given frames in three ways] 1.0 takes none. 1.1 and 1.2 see them among the noisy latents,
# and `x_mask` says which they are. 1.3 and 2.0 are told of them beside the noisy latents, which
# stay noisy everywhere; the given frames are put into the finished latents.
@dataclass(frozen=True)
class Release:
    """Sampling of a public model, as its release published it."""

    name: str
    # Function from the model and the autoencoder's compression to its diffusion.
    flow: Callable[[nn.Module, tuple[int, int, int]], Flow]
    # Number of sampling steps that were published.
    steps: int
    # Weight of the caption that was published.
    guidance: float
    fps: float
    # How it is told of given frames: nowhere, among the latents, or beside them.
    given: str = "among"
    # Whether its texts are padded to their full length, and the padding is read.
    whole: bool = False


def _iddpm(model: nn.Module, compression: tuple[int, int, int]) -> Flow:
    return IDDPM(guided_channels=GUIDED)


def _warped(model: nn.Module, compression: tuple[int, int, int]) -> Flow:
    return RectifiedFlow(use_timestep_transform=True, transform="1.2")


def _counted(model: nn.Module, compression: tuple[int, int, int]) -> Flow:
    return RectifiedFlow(use_timestep_transform=True, transform="1.3")


def _packed(model: nn.Module, compression: tuple[int, int, int]) -> Flow:
    area = math.prod(c * p for c, p in zip(compression[1:], patch_of(model)[1:], strict=True))
    return RectifiedFlow(use_timestep_transform=True, transform="2.0", token_area=area)


RELEASES = {
    "STDiT": Release("Open-Sora 1.0", _iddpm, 100, 7.0, 8.0, given="nowhere"),
    "STDiT2": Release("Open-Sora 1.1", _iddpm, 100, 7.0, 24.0),
    "STDiT3": Release("Open-Sora 1.2", _warped, 30, 7.0, 24.0),
    "STDiT3 with image conditioning": Release(
        "Open-Sora 1.3", _counted, 30, 7.0, 24.0, given="beside"
    ),
    "MMDiT with image conditioning": Release(
        "Open-Sora 2.0", _packed, 50, 7.5, 24.0, given="beside", whole=True
    ),
    "MMDiT": Release("FLUX.1", _packed, 50, 4.0, 24.0, given="nowhere", whole=True),
}
"""Releases by class of the model."""


def release_of(model: nn.Module) -> Release:
    """Returns the release that a model is of."""
    names = ("x_embedder_cond", "cond_in")
    beside = any(getattr(model, name, None) is not None for name in names)
    return RELEASES[f"{type(model).__name__}{' with image conditioning' if beside else ''}"]


def patch_of(model: Any) -> tuple[int, int, int]:
    """Returns latent frames, rows and columns of a token."""
    size = model.patch_size
    return (1, size, size) if isinstance(size, int) else tuple(size)


def told(bucket: Bucket, fps: float, ones: Tensor) -> dict[str, Tensor]:
    """Returns what models can be told of clips of a shape, [B] each."""
    values = {
        "fps": FPS_OF_PICTURES if bucket.frames == 1 else fps,
        "height": bucket.height,
        "width": bucket.width,
        "num_frames": bucket.frames,
        "ar": bucket.height / bucket.width,
    }
    return {name: ones * value for name, value in values.items()}


class Denoiser:
    """Calls an STDiT with what its forward takes of what is known."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._takes = frozenset(inspect.signature(model.forward).parameters)

    def like(self, device: torch.device) -> Tensor:
        """Returns a one of the dtype to sample in: float64 for such a model, float32 for others."""
        double = next(self.model.parameters()).dtype == torch.float64
        return torch.ones((), dtype=torch.float64 if double else torch.float32, device=device)

    @property
    def nothing(self) -> Tensor | None:
        """Returns the embedding of no caption, [L, D]; None where the empty caption's is taken."""
        return self.model.y_embedder.y_embedding  # type: ignore[union-attr, return-value]

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        """Predicts for latents x [B, C, T, H, W] at levels [B]."""
        known = {name: value for name, value in inputs.items() if name in self._takes}
        return self.model(x, timestep, **known, **self._beside(x, inputs))

    def _beside(self, x: Tensor, inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Returns what 1.3 is told of given frames."""
        held, latents = inputs.get("held"), inputs.get("latents")
        if held is None or latents is None or not bool(held.any()):
            return {}
        mask = held[:, None, :, None, None].to(x.dtype).expand_as(x)
        # A branch without given frames reads as the others do, and is shown none.
        frames = held.any(dim=0).nonzero().flatten().tolist()
        return {"cond": latents.to(x) * mask, "cond_mask": mask, "mask_index": frames}


class PackedDenoiser(Denoiser):
    """Calls an MMDiT with packed latents, and unpacks its velocity."""

    @property
    def nothing(self) -> Tensor | None:
        """Returns None: the empty caption is encoded as others are."""
        return None

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        """Predicts for latents, as of `Denoiser`."""
        # ``vector`` is the caption's own [B, width], and ``strength`` that of guidance [B], which a
        # distilled model is told.
        model: Any = self.model
        size, sizes = model.patch_size, x.shape[2:]
        y, vector = inputs["y"], inputs["vector"]
        assert y is not None, "the pipeline encodes captions"
        assert vector is not None, "the pipeline checked the second text encoder"
        text = y.squeeze(1)
        packed: dict[str, Any] = {
            "img": pack_latents(x, size),
            "img_ids": places_of(len(x), sizes, size, x.device),
            "txt": text,
            "txt_ids": torch.zeros(*text.shape[:2], 3, dtype=torch.long, device=x.device),
            "timesteps": timestep / 1000,
            "y_vec": vector,
        }
        if model.cond_in is not None:
            held, latents = inputs.get("held"), inputs.get("latents")
            mask = torch.zeros_like(x[:, :1])
            shown = torch.zeros_like(x)
            if held is not None and latents is not None:
                mask = mask + held[:, None, :, None, None].to(x.dtype)
                shown = latents.to(x) * mask
            packed["cond"] = pack_latents(torch.cat([mask, shown], dim=1), size)
        if model.guidance_in is not None:
            packed["guidance"] = inputs["strength"]
        # The model's velocity is noise - x0.
        return -unpack_latents(model(**packed), sizes, size)


def denoiser_of(model: nn.Module) -> Denoiser:
    """Returns the denoiser of a public transformer."""
    return PackedDenoiser(model) if isinstance(model, MMDiT) else Denoiser(model)

"""Generates clips from sentences with a trained run.

`VideoModel.load` reads a run folder; `VideoModel.generate` makes clips: text-to-video,
text-to-image (one frame), and, given a picture or the end of a clip, image-to-video and extension.
`VideoModel.share` makes all ranks of the world make each clip together (`_shared.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.checkpoint import StepReader, load
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.jobs import Display, derive
from gulliver.models import STDiT3, VideoAutoencoder
from gulliver.options import check_options, resolved
from gulliver.video._autoencoder_training import load_autoencoder
from gulliver.video._caches import Counts, cache_blocks
from gulliver.video._config import (
    SamplingConfig,
    TrainConfig,
    check_clip,
    differences,
    from_plain,
    parse_shapes,
)
from gulliver.video._media import fit
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._run import Run
from gulliver.video._shared import Shared, share, split_ranks
from gulliver.video._sources import vocabulary
from gulliver.video._training import build_model
from gulliver.video._words import WordEncoder

FPS = 8.0


@dataclass(frozen=True)
class Request:
    """One clip to be made.

    `given` is a picture [3, 1, H, W] or the beginning of the clip [3, 4k + 1, H, W] in [-1, 1], of
    any height and width: it is scaled and cut to the clip's.
    """

    prompt: str
    bucket: Bucket
    seed: int = 0
    given: Tensor | None = None


class VideoModel:
    """A trained text-to-video model: text encoder, transformer (averaged weights), autoencoder.

    Attributes:
        counts: numbers of calls that caches have saved so far.
    """

    def __init__(self, config: TrainConfig, model: STDiT3, autoencoder: VideoAutoencoder) -> None:
        self.config = config
        self.model = model.eval()
        self.autoencoder = autoencoder.eval()
        self.text = WordEncoder(config.model.text_channels, config.model.text_length)
        self.flow = RectifiedFlow(
            shift=config.flow.shift, use_timestep_transform=config.flow.shift_by_size
        )
        self.known_words = vocabulary(config)
        self.shared = Shared(model)
        self.counts = Counts()

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> Self:
        """Loads the newest checkpoint of a run folder.

        Raises:
            GulliverError: no run, no checkpoint, or one made with another configuration.
        """
        run = Run(folder)
        config = run.read_config()
        checkpoint = run.newest_checkpoint()
        with StepReader(checkpoint) as reader:
            trained = reader.value("run")["config"]
        changed = differences(trained, resolved(config))
        if changed:
            raise GulliverError(
                f"{checkpoint} was made with another configuration: {'; '.join(changed)}"
            )
        autoencoder = load_autoencoder(run.autoencoder_path)
        model = build_model(from_plain(trained), autoencoder.latent_channels)
        load(checkpoint, {"ema": model})
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(config, model.to(device), autoencoder.to(device))

    def share(
        self,
        sequence: int = 0,
        guidance_ranks: int = 0,
        guided: bool = True,
        show: Callable[[str], None] | None = None,
    ) -> None:
        """Makes all ranks of the world make each clip together; every rank calls it, once.

        Afterwards every rank asks for the same clips, and gets them.

        Args:
            sequence: number of ranks that share a clip's tokens; 0: all that guidance leaves.
            guidance_ranks: number of ranks for the branches with and without caption; 0: 2 where
                possible.
            guided: whether guidance will be on.
            show: function that is told, on rank 0, how clips are cut.

        Raises:
            GulliverError: the sizes do not make the world.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = split_ranks(world, sequence, guidance_ranks, guided)
        self.shared = share(self.model, *sizes, show=show)

    def check(self, request: Request) -> None:
        """Refuses a request that cannot be fulfilled.

        Raises:
            GulliverError: an empty prompt; sizes that do not fit the compression and the patch.
        """
        if not request.prompt.strip():
            raise GulliverError(
                "the prompt is empty: write something such as 'the digit 3 moving left'"
            )
        bucket = request.bucket
        check_clip(bucket.frames, bucket.height, bucket.width)
        _, step_h, step_w = (
            c * p for c, p in zip(self.autoencoder.compression, self.model.patch_size, strict=True)
        )
        if bucket.height % step_h or bucket.width % step_w or min(bucket.height, bucket.width) < 8:
            right = [
                max(s, round(n / s) * s)
                for n, s in ((bucket.height, step_h), (bucket.width, step_w))
            ]
            raise GulliverError(
                f"{bucket.height}x{bucket.width} does not fit patches of {step_h}x{step_w} pixels: "
                f"try {right[0]}x{right[1]}"
            )
        unit = self.autoencoder.compression[0]
        if bucket.frames < 1 or (bucket.frames - 1) % unit:
            below = max(0, (bucket.frames - 1) // unit) * unit + 1
            raise GulliverError(
                f"{bucket.frames} frames do not fit the autoencoder: try {below} or {below + unit} "
                f"({unit} k + 1)"
            )
        if request.given is not None and request.given.shape[1] >= bucket.frames:
            raise GulliverError(
                f"{request.given.shape[1]} frames are given, so a clip of {bucket.frames} leaves "
                "nothing to make: ask for more --frames"
            )

    def remarks(self, request: Request) -> list[str]:
        """Lists what a user should know of a request that is fulfilled all the same."""
        remarks = []
        if self.known_words is not None:
            words = request.prompt.lower().split()
            strange = [word for word in words if word.strip(".,;!?") not in self.known_words]
            if strange:
                names = ", ".join(repr(word) for word in strange)
                remarks.append(
                    f"this model never saw {names}: expect nothing sensible of {request.prompt!r} "
                    f"(it knows: {', '.join(sorted(self.known_words))})"
                )
        shapes = parse_shapes(self.config.data.shapes)
        if request.bucket not in shapes:
            known = ", ".join(f"{s.frames}x{s.height}x{s.width}" for s in shapes)
            b = request.bucket
            remarks.append(f"{b.frames}x{b.height}x{b.width} was not trained (trained: {known})")
        return remarks

    def generate(
        self, requests: list[Request], sampling: SamplingConfig | None = None, show: bool = False
    ) -> list[Tensor]:
        """Makes the clips, in the order of the requests, each [3, T, H, W] in [-1, 1].

        A clip depends on its own request only, not on those beside it (up to rounding); with the
        cache first-block those of a batch decide together what is re-used.
        """
        sampling = sampling or SamplingConfig()
        check_options(sampling)
        for request in requests:
            self.check(request)
        self.shared.check_guidance(sampling.guidance != 1)
        self.shared.agree([_described(r) for r in requests] + [sampling])
        groups: dict[tuple[Bucket, int], list[int]] = {}
        for index, request in enumerate(requests):
            given = 0 if request.given is None else request.given.shape[1]
            groups.setdefault((request.bucket, given), []).append(index)
        clips: dict[int, Tensor] = {}
        with (
            Display("generating", len(requests), enabled=show) as display,
            cache_blocks(self.model, sampling.cache, self.shared.whole) as cache,
        ):
            for members in groups.values():
                for start in range(0, len(members), sampling.batch_size):
                    part = members[start : start + sampling.batch_size]
                    made = self._sample([requests[index] for index in part], sampling)
                    clips.update(zip(part, made, strict=True))
                    display.advance(len(part))
        self.counts.add(cache.counts)
        return [clips[index] for index in range(len(requests))]

    @torch.no_grad()
    def _sample(self, requests: list[Request], sampling: SamplingConfig) -> list[Tensor]:
        """Samples requests of one bucket, all with or all without given frames."""
        device = next(self.model.parameters()).device
        bucket = requests[0].bucket
        shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        noise = torch.stack([_noise(request.seed, shape) for request in requests]).to(device)
        y, mask = self.text.encode([request.prompt for request in requests])
        count = len(requests)
        conditions = {
            "y": y.to(device),
            "mask": mask.to(device),
            "fps": torch.full((count,), FPS, device=device),
            "height": torch.full((count,), float(bucket.height), device=device),
            "width": torch.full((count,), float(bucket.width), device=device),
        }
        null = self.model.y_embedder.y_embedding[: y.shape[2]]
        given, generate = self._given(requests, shape, device)
        latents = self.flow.sample(
            self.shared.model,
            noise,
            conditions,
            null_y=null[None, None].expand(count, 1, -1, -1),
            steps=sampling.steps,
            cfg_scale=sampling.guidance,
            given=given,
            mask=generate,
        )
        videos = self.shared.decode(self.autoencoder, latents, bucket).clamp(-1, 1).cpu()
        return list(videos.unbind())

    def _given(
        self, requests: list[Request], shape: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns given latents [B, C, T, H, W], then zeros, and a mask [B, T] of the rest."""
        if requests[0].given is None:
            return None, None
        bucket = requests[0].bucket
        frames = torch.stack(
            [fit(r.given, bucket.height, bucket.width) for r in requests if r.given is not None]
        )
        head = self.autoencoder.encode(frames.to(device))
        latents = torch.zeros(len(requests), *shape, device=device)
        latents[:, :, : head.shape[2]] = head
        generate = torch.arange(shape[1], device=device) >= head.shape[2]
        return latents, generate.expand(len(requests), -1)


def extend(
    model: VideoModel,
    clip: Tensor,
    prompt: str,
    bucket: Bucket,
    overlap: int,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
) -> Tensor:
    """Continues a clip.

    Args:
        model: trained model.
        clip: clip [3, T, H, W] in [-1, 1]; scaled and cut to the bucket's height and width.
        prompt: sentence that says what happens next.
        bucket: shape of the sampled piece, which begins with the overlap.
        overlap: number of last frames of the clip that are given (4 k + 1).
        seed: seed of the noise.
        sampling: steps and guidance.

    Returns:
        The clip followed by the new frames, [3, T + bucket.frames - overlap, height, width].

    Raises:
        GulliverError: the overlap is longer than the clip, or not 4 k + 1.
    """
    if not 1 <= overlap <= clip.shape[1]:
        raise GulliverError(f"cannot condition on {overlap} frames of a clip of {clip.shape[1]}")
    clip = fit(clip, bucket.height, bucket.width)
    model.autoencoder.latent_shape(overlap, bucket.height, bucket.width)
    request = Request(prompt, bucket, seed, given=clip[:, -overlap:])
    piece = model.generate([request], sampling)[0]
    return torch.cat([clip, piece[:, overlap:]], dim=1)


def _described(request: Request) -> tuple[object, ...]:
    """Returns what ranks that make a clip together compare."""
    given = None if request.given is None else request.given.cpu().numpy().tobytes()
    return request.prompt, request.bucket, request.seed, given


def _noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(derive(seed, 4))
    return torch.randn(shape, generator=generator)

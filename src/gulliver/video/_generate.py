"""Generates clips from sentences with a trained run.

`VideoModel.load` reads a run folder; `VideoModel.generate` makes clips: text-to-video,
text-to-image (one frame), and, given pictures or clips, image-to-video, extension, connection and
editing (`_requests.py`). `VideoModel.share` makes all ranks of the world make each clip together
(`_shared.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.checkpoint import StepReader, load, read_json
from gulliver.data import STILL_FPS, Bucket
from gulliver.errors import GulliverError
from gulliver.jobs import derive
from gulliver.models import STDiT3
from gulliver.options import differences, resolved
from gulliver.video._build import build_model
from gulliver.video._caches import Counts, cache_blocks
from gulliver.video._config import (
    MAY_CHANGE,
    SamplingConfig,
    TrainConfig,
    check_clip,
    from_plain,
    parse_shapes,
)
from gulliver.video._diffusion import Preview
from gulliver.video._digits import FPS
from gulliver.video._guidance import check_oscillation, guidance_of
from gulliver.video._media import check_pixels, fit
from gulliver.video._prompts import loop_prompts
from gulliver.video._public_autoencoders import load_autoencoder
from gulliver.video._requests import (
    ClipPiece,
    Request,
    check_frames,
    check_request,
    described,
    given_latents,
    made_by_loops,
)
from gulliver.video._run import Run
from gulliver.video._shared import SharedModel, ranks_alike, share, share_coding, split_ranks
from gulliver.video._sources import make_flow, vocabulary
from gulliver.video._words import WordEncoder


class ClipMaker(Protocol):
    """A model that makes clips: a trained run's, or public parts."""

    @property
    def autoencoder(self) -> Any:
        """Autoencoder of its latents."""

    def generate(
        self, requests: list[Request], sampling: SamplingConfig | None = None
    ) -> list[Tensor]:
        """Makes a clip of each request, in their order."""
        ...


class VideoModel:
    """A trained text-to-video model: text encoder, transformer (averaged weights), autoencoder.

    Args:
        config: configuration of the run.
        model: transformer.
        autoencoder: autoencoder of its latents.
        fps: frame rate of the clips that it has learnt from, which it is told.

    Attributes:
        counts: numbers of calls that caches have saved in the last `generate`.
    """

    def __init__(
        self, config: TrainConfig, model: STDiT3, autoencoder: Any, fps: float = FPS
    ) -> None:
        self.config, self.fps = config, fps
        self.model = model.eval()
        self.autoencoder = autoencoder.eval()
        self.text = WordEncoder(config.model.text_channels, config.model.text_length)
        self.flow = make_flow(config.flow, autoencoder)
        self.known_words = vocabulary(config)
        self.shared = SharedModel(model)
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
        changed = differences(trained, resolved(config), MAY_CHANGE)
        if changed:
            raise GulliverError(
                f"{checkpoint} was made with another configuration: {'; '.join(changed)}"
            )
        if config.model.public:
            raise GulliverError(
                f"{folder} trained public parts: open it with gulliver.video.open_run, as "
                "`gulliver generate` does"
            )
        autoencoder = load_autoencoder(run.autoencoder_path)
        model = build_model(from_plain(trained), autoencoder)
        load(checkpoint, {"ema": model})
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Runs on the digits have no such file.
        told = read_json(run.clips_path)["fps"] if run.clips_path.is_file() else FPS
        return cls(config, model.to(device), autoencoder.to(device), told)

    def share(
        self,
        sequence: int = 0,
        guidance_ranks: int = 0,
        guided: bool = True,
        show: Callable[[str], None] | None = None,
        image_guided: bool = False,
        autoencoder: str = "auto",
    ) -> None:
        """Makes all ranks of the world make each clip together; every rank calls it, once.

        Afterwards every rank asks for the same clips, and gets them.

        Args:
            sequence: number of ranks that share a clip's tokens; 0: all that guidance leaves.
            guidance_ranks: number of ranks for the branches with and without caption; 0: 2 where
                possible.
            guided: whether guidance will be on.
            show: function that is told, on rank 0, how clips are cut.
            image_guided: whether image guidance will be on.
            autoencoder: dim of clips that is cut to decode them, "auto" for the predicted
                fastest, or "off" for every rank by itself.

        Raises:
            GulliverError: the sizes do not make the world.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = split_ranks(world, sequence, guidance_ranks, guided, image_guided)
        self.shared = share(self.model, *sizes, show=show)
        share_coding(self.autoencoder, ranks_alike("all"), autoencoder, show)

    def check(self, request: Request, sampling: SamplingConfig | None = None) -> None:
        """Refuses a request that cannot be fulfilled.

        Raises:
            GulliverError: what `gulliver.video.check_request` refuses; sizes that do not fit the
                compression and the patch; frames that a reference or the clip does not have;
                sentences that are too long.
        """
        sampling = sampling or SamplingConfig()
        check_request(request, sampling)
        check_oscillation(sampling)
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
        check_frames(request, self.autoencoder)
        texts = loop_prompts(request.prompt, request.loops)
        self.text.encode([*texts, request.negative_prompt] if request.negative_prompt else texts)

    def fps_of(self, bucket: Bucket) -> float:
        """Returns the frame rate that the model is told of clips of a shape."""
        return self.fps if bucket.frames > 1 or self.config.data.made else STILL_FPS

    def remarks(self, request: Request) -> list[str]:
        """Lists what a user should know of a request that is fulfilled all the same."""
        remarks = []
        if self.known_words is not None:
            texts = [*loop_prompts(request.prompt, request.loops), request.negative_prompt]
            words = " ".join(dict.fromkeys(texts)).lower().split()
            strange = [word for word in words if word.strip(".,;!?") not in self.known_words]
            if strange:
                names = ", ".join(repr(word) for word in strange)
                remarks.append(
                    f"this model never saw {names}: expect nothing sensible of {request.prompt!r} "
                    f"(it knows: {', '.join(sorted(self.known_words))})"
                )
        shapes = parse_shapes(self.config.data.shapes)
        if request.bucket not in shapes and self.config.data.buckets is None:
            known = ", ".join(f"{s.frames}x{s.height}x{s.width}" for s in shapes)
            b = request.bucket
            remarks.append(f"{b.frames}x{b.height}x{b.width} was not trained (trained: {known})")
        return remarks

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig | None = None,
        show: bool = False,
        preview: Preview | None = None,
    ) -> list[Tensor]:
        """Makes the clips, in the order of the requests, each [3, T, H, W] in [-1, 1].

        A clip depends on its own request only, not on those beside it (up to rounding); with the
        cache first-block those of a batch decide together what is re-used.

        Args:
            requests: clips to make.
            sampling: steps and guidance; None for the usual ones.
            show: whether to display progress.
            preview: function that is called after each step of a batch with (steps done, steps,
                estimate of its latents), which the autoencoder decodes; what it raises ends the
                call.
        """
        sampling = sampling or SamplingConfig()
        for request in requests:
            self.check(request, sampling)
        self.shared.check_guidance(sampling.guidance != 1, sampling.guidance_image != 1)
        self.shared.agree([described(r) for r in requests] + [sampling])

        def sample(pieces: list[ClipPiece]) -> list[Tensor]:
            return self._sample(pieces, sampling, preview)

        unit = self.autoencoder.compression[0]
        with cache_blocks(self.model, sampling.cache, self.shared.whole) as cache:
            clips = made_by_loops(requests, sample, sampling.batch_size, unit, show)
        self.counts = cache.counts
        return clips

    @torch.no_grad()
    def _sample(
        self, pieces: list[ClipPiece], sampling: SamplingConfig, preview: Preview | None
    ) -> list[Tensor]:
        """Samples pieces of one bucket, all with or all without given frames."""
        device = next(self.model.parameters()).device
        bucket, count = pieces[0].bucket, len(pieces)
        shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        noise = torch.stack([latent_noise(piece.seed, shape) for piece in pieces]).to(device)
        y, mask, null = self._captions(pieces)
        conditions = {
            "y": y.to(device),
            "mask": mask.to(device),
            "fps": torch.full((count,), self.fps_of(bucket), device=device),
            "height": torch.full((count,), float(bucket.height), device=device),
            "width": torch.full((count,), float(bucket.width), device=device),
        }
        given, generate = given_latents(pieces, self.autoencoder, device)
        guidance = guidance_of(sampling)
        if given is None:  # The first of several loops: nothing is given yet.
            guidance = replace(guidance, image=1.0)
        latents = self.flow.sample(
            self.shared.model,
            noise,
            conditions,
            null_inputs=null,
            steps=sampling.steps,
            cfg_scale=guidance,
            given=given,
            mask=generate,
            preview=preview,
        )
        videos = self.autoencoder.decode(latents, bucket.frames).clamp(-1, 1).cpu()
        return list(videos.unbind())

    def _captions(self, pieces: list[ClipPiece]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns vectors and mask of the captions, and those without caption."""
        # Without a negative prompt the learnt null caption stands there, as long as the caption.
        negative = [n for n, piece in enumerate(pieces) if piece.negative_prompt]
        texts = [p.prompt for p in pieces] + [pieces[n].negative_prompt for n in negative]
        vectors, masks = self.text.encode(texts)
        count = len(pieces)
        y, mask = vectors[:count], masks[:count]
        embedding = self.model.y_embedder.y_embedding[: y.shape[2]].to(y)
        null_y, null_mask = embedding[None, None].repeat(count, 1, 1, 1), mask.clone()
        null_y[negative], null_mask[negative] = vectors[count:], masks[count:]
        return y, mask, {"y": null_y, "mask": null_mask}


def extend(
    model: ClipMaker,
    clip: Tensor,
    prompt: str,
    bucket: Bucket,
    overlap: int,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
    negative_prompt: str = "",
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
        negative_prompt: sentence to lead away from; empty: no caption.

    Returns:
        The clip followed by the new frames, [3, T + bucket.frames - overlap, height, width].

    Raises:
        GulliverError: the overlap is longer than the clip, or not 4 k + 1.
    """
    check_pixels("the clip", clip)
    if not 1 <= overlap <= clip.shape[1]:
        raise GulliverError(f"cannot condition on {overlap} frames of a clip of {clip.shape[1]}")
    clip = fit(clip.float(), bucket.height, bucket.width)
    model.autoencoder.latent_shape(overlap, bucket.height, bucket.width)
    request = Request(prompt, bucket, seed, clip[:, -overlap:], negative_prompt)
    piece = model.generate([request], sampling)[0]
    return torch.cat([clip, piece[:, overlap:]], dim=1)


def connect(
    model: ClipMaker,
    first: Tensor,
    last: Tensor,
    prompt: str,
    bucket: Bucket,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
) -> Tensor:
    """Makes a clip that begins with one picture or clip and ends with another.

    Args:
        model: trained model.
        first: picture [3, 1, H, W] or clip [3, 4 k + 1, H, W] in [-1, 1] to begin with; scaled and
            cut to the bucket's height and width.
        last: picture or clip to end with.
        prompt: sentence that says what happens between them.
        bucket: shape of the whole clip.
        seed: seed of the noise.
        sampling: steps and guidance.

    Returns:
        The clip [3, bucket.frames, height, width].

    Raises:
        GulliverError: the two leave nothing to make, or do not fit the autoencoder.
    """
    check_pixels("the first picture or clip", first)
    check_pixels("the last picture or clip", last)
    head, tail = (
        model.autoencoder.latent_shape(clip.shape[1], bucket.height, bucket.width)[1]
        for clip in (first, last)
    )
    strategy = f"0,0,0,0,{head};0,1,0,-{tail},{tail}"
    request = Request(prompt, bucket, seed, references=(first, last), mask_strategy=strategy)
    return model.generate([request], sampling)[0]


def latent_noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(derive(seed, 4))
    return torch.randn(shape, generator=generator)

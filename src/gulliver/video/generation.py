"""One clip on several ranks: guidance x sequence.

Classifier-free guidance asks the model twice for each step, with the caption and without it. With
two *guidance* ranks each asks once, and they exchange what they found. The ranks of a *sequence*
share the tokens of the clip (`gulliver.booster.hybrid`). Both together: rank
``branch * sequence + rank in the sequence``, so that those of a sequence, which send most, are
neighbours. Noise,
conditions and Euler steps are computed on every rank, and are the same on all. Clips are decoded by
all ranks together (`share_coding`).

Read `split_ranks`, `share`, `SharedModel`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.booster.hybrid.stdit import wire_stdit
from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.loading import load
from gulliver.checkpoint.reader import StepReader
from gulliver.comm.collectives import all_gather, gather_objects
from gulliver.comm.groups import ALONE, RankGroup, shared_rank_group
from gulliver.comm.torus import make_axes
from gulliver.data.clips import STILL_FPS, Bucket
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.models.stdit import STDiT3
from gulliver.options import differences, resolved
from gulliver.parallel.convolution.networks import has_networks
from gulliver.parallel.convolution.share import SharedNetworks, share_autoencoder
from gulliver.parallel.sequence.layout import SequencePlan, make_groups
from gulliver.video.caches import Counts, cache_blocks
from gulliver.video.config import (
    MAY_CHANGE,
    SamplingConfig,
    TrainConfig,
    check_clip,
    from_plain,
    parse_shapes,
)
from gulliver.video.diffusion import Preview, check_oscillation, guidance_of
from gulliver.video.digits import FPS
from gulliver.video.media import check_pixels, fit
from gulliver.video.public_models import load_autoencoder
from gulliver.video.requests import (
    ClipPiece,
    Request,
    check_frames,
    check_request,
    described,
    given_latents,
    loop_prompts,
    made_by_loops,
)
from gulliver.video.run import Run
from gulliver.video.sources import build_model, make_flow, vocabulary
from gulliver.video.text_encoders import WordEncoder

THREE_BRANCHES = (
    "it asks the model three times in a step, for which there is no even share; use 1 guidance "
    "rank, and let the others share the sequence"
)


def split_ranks(
    world: int,
    sequence: int = 0,
    guidance_ranks: int = 0,
    guided: bool = True,
    image_guided: bool = False,
) -> tuple[int, int]:
    """Chooses how many ranks share a clip's tokens, and how many the branches of guidance."""
    if guidance_ranks not in (0, 1, 2) or sequence < 0:
        raise GulliverError(
            f"--sequence {sequence} x --guidance-ranks {guidance_ranks} cannot be: guidance has 2 "
            "branches, so it takes 1 or 2 ranks, and a sequence at least 1"
        )
    if guidance_ranks == 2 and image_guided:
        raise GulliverError(f"--guidance-ranks 2 with image guidance: {THREE_BRANCHES}")
    if guidance_ranks == 2 and not guided:
        raise GulliverError(
            "--guidance-ranks 2 with --guidance 1: guidance is off, so there is one branch only; "
            "leave --guidance-ranks out"
        )
    if guidance_ranks == 0:
        both = guided and not image_guided and world % 2 == 0 and sequence in (0, world // 2)
        guidance_ranks = 2 if both else 1
    if sequence == 0:
        sequence = max(1, world // guidance_ranks)
    if sequence * guidance_ranks != world:
        raise GulliverError(
            f"--sequence {sequence} x --guidance-ranks {guidance_ranks} = "
            f"{sequence * guidance_ranks} ranks, but there are {world}: start as many, or leave "
            "one of the two out"
        )
    return sequence, guidance_ranks


@dataclass(frozen=True)
class SharedModel:
    """The ranks that make clips together."""

    # Function called as the model is, with both branches of guidance in one batch.
    model: Callable[..., Tensor]
    ranks: int = 1
    rank: int = 0
    # Rank group that shares the branches of guidance.
    branches: RankGroup = ALONE

    def agree(self, requests: Any) -> None:
        """Refuses requests that differ between the ranks."""
        if self.ranks == 1:
            return
        found = gather_objects(hashlib.sha256(repr(requests).encode()).hexdigest())
        for rank, digest in enumerate(found):
            if digest != found[0]:
                raise GulliverError(
                    f"rank {rank} was asked for other clips than rank 0, and they make them "
                    "together: give all ranks the same requests"
                )

    def check_guidance(self, guided: bool, image_guided: bool = False) -> None:
        """Refuses ranks that the branches of guidance cannot be dealt to."""
        if self.branches.size > 1 and image_guided:
            raise GulliverError(f"image guidance on 2 guidance ranks: {THREE_BRANCHES}")
        if self.branches.size > 1 and not guided:
            raise GulliverError(
                "guidance 1 has one branch only, and the ranks are shared between two: share the "
                "model with guidance_ranks=1"
            )

    def whole(self, sums: Tensor) -> Tensor:
        """Adds up sums [rows, 2] over a sequence; of both branches: rows of all, alike on all."""
        if self.ranks == 1:
            return sums
        parts = sums.new_empty(self.ranks, *sums.shape)
        all_gather(parts.view(-1), sums.contiguous().view(-1))
        return parts.unflatten(0, (self.branches.size, -1)).sum(dim=1).flatten(0, 1)


def share_coding(
    autoencoder: Any,
    rank_group: RankGroup,
    dim: str,
    show: Callable[[str], None] | None = None,
) -> SharedNetworks | None:
    """Makes ranks that need the same clips encode and decode them together; all of them call it."""
    if dim == "off" or rank_group.size == 1 or not has_networks(autoencoder):
        return None
    return share_autoencoder(autoencoder, rank_group, dim, show if rank_group.rank == 0 else None)


def ranks_alike(place: Any) -> RankGroup:
    """Returns the ranks of the world that name the same place; every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    rows: dict[Any, list[int]] = {}
    for rank, other in enumerate(gather_objects(place)):
        rows.setdefault(other, []).append(rank)
    return shared_rank_group(list(rows.values()), "autoencoder")


def share(
    model: Any,
    sequence: int,
    guidance_ranks: int,
    *,
    call: Callable[..., Tensor] | None = None,
    scheme: str | None = None,
    show: Callable[[str], None] | None = None,
) -> SharedModel:
    """Makes all ranks of the world make each clip together; every rank calls it, once."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    split_ranks(world, sequence, guidance_ranks)
    own: Callable[..., Tensor] = model if call is None else call
    if world == 1:
        return SharedModel(own)
    axes = make_axes({"branch": guidance_ranks, "sequence": sequence})
    branches = axes.rank_group("branch") if guidance_ranks > 1 else ALONE
    if sequence > 1:
        starts = range(0, world, sequence)
        groups = make_groups(
            _plan(sequence, model.num_heads), [list(range(s, s + sequence)) for s in starts]
        )
        told = show if dist.get_rank() == 0 else None
        wire_stdit(model, groups, "all_to_all", scheme=scheme, show=told)
    called = OneBranch(own, branches) if branches.size > 1 else own
    return SharedModel(called, world, dist.get_rank(), branches)


class OneBranch:
    """Calls a model with this rank's branch of a batch that holds two, and gives both answers."""

    def __init__(self, model: Callable[..., Tensor], rank_group: RankGroup) -> None:
        assert rank_group.size == 2, "guidance has two branches"
        self._model, self._rank_group = model, rank_group

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        of_branch = {n: None if v is None else self._own(v) for n, v in inputs.items()}
        own = self._model(self._own(x), self._own(timestep), **of_branch).contiguous()
        both = own.new_empty(2, *own.shape)
        all_gather(both.view(-1), own.view(-1), self._rank_group.process_group)
        # A process group numbers its ranks in ascending order, as this rank group does.
        return both.flatten(0, 1)

    def _own(self, both: Tensor) -> Tensor:
        return both.chunk(2)[self._rank_group.rank]


def _plan(sequence: int, heads: int) -> SequencePlan:
    """Plans to exchange heads between as many ranks as heads allow, in a ring of such groups."""
    ulysses = max(n for n in range(1, sequence + 1) if sequence % n == 0 and n <= heads)
    return SequencePlan(ulysses=ulysses, inner=sequence // ulysses)


# Generates clips from sentences with a trained run.
#
# `VideoModel.load` reads a run folder; `VideoModel.generate` makes clips: text-to-video,
# text-to-image (one frame), and, given pictures or clips, image-to-video, extension, connection
# and editing (`requests.py`). `VideoModel.share` makes all ranks of the world make each clip
# together (`generation.py`).


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
                f"{folder} trained public parts: open it with gulliver.video.pipeline.open_run, as "
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
            GulliverError: what `gulliver.video.requests.check_request` refuses; sizes that do not
            fit the
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

"""Generation on several ranks (guidance x sequence), on small devices, and of long clips.

Classifier-free guidance calls the model twice per step, with and without a caption. With two
*guidance* ranks each makes one call, and they exchange the results. The ranks of a *sequence* share
the tokens of the clip (`gulliver.booster.hybrid`). Combined, the rank is ``branch * sequence + rank
in the sequence``, so that ranks of a sequence, which communicate most, are adjacent. Noise,
conditioning and Euler steps are computed on every rank with equal results. All ranks decode clips
together (`share_coding`).

Start with `split_ranks`, `share` and `SharedModel`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.booster.hybrid.stdit import wire_stdit
from gulliver.comm.collectives import all_gather, gather_objects
from gulliver.comm.groups import ALONE, RankGroup, shared_rank_group
from gulliver.comm.torus import make_axes
from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError
from gulliver.hardware.probe import memory_bytes
from gulliver.jobs.log import derive
from gulliver.memory.symbolic import activation_peak
from gulliver.parallel.convolution.networks import has_networks
from gulliver.parallel.convolution.share import SharedNetworks, share_autoencoder
from gulliver.parallel.convolution.stream import stream_decode
from gulliver.parallel.sequence.layout import SequencePlan, make_groups
from gulliver.video.config import SamplingConfig
from gulliver.video.media import check_pixels, fit
from gulliver.video.requests import Request
from gulliver.video.text_encoders import EncodedText, TextEncoder, encoding_of, padded

if TYPE_CHECKING:
    from gulliver.video.pipeline import VideoPipeline

THREE_BRANCHES = (
    "it needs three model calls per step, which cannot be split evenly over two ranks; use 1 "
    "guidance rank, and sequence parallelism for the others"
)


def split_ranks(
    world: int,
    sequence: int = 0,
    guidance_ranks: int = 0,
    guided: bool = True,
    image_guided: bool = False,
) -> tuple[int, int]:
    """Chooses the numbers of ranks for sequence parallelism and for guidance branches."""
    if guidance_ranks not in (0, 1, 2) or sequence < 0:
        raise GulliverError(
            f"--sp-size {sequence} x --guidance-ranks {guidance_ranks} is invalid; guidance uses "
            "1 or 2 ranks, and a sequence at least 1"
        )
    if guidance_ranks == 2 and image_guided:
        raise GulliverError(f"--guidance-ranks 2 does not support image guidance: {THREE_BRANCHES}")
    if guidance_ranks == 2 and not guided:
        raise GulliverError(
            "--guidance-ranks 2 has no effect with --guidance 1, which has a single branch; omit "
            "--guidance-ranks"
        )
    if guidance_ranks == 0:
        both = guided and not image_guided and world % 2 == 0 and sequence in (0, world // 2)
        guidance_ranks = 2 if both else 1
    if sequence == 0:
        sequence = max(1, world // guidance_ranks)
    if sequence * guidance_ranks != world:
        raise GulliverError(
            f"--sp-size {sequence} x --guidance-ranks {guidance_ranks} = "
            f"{sequence * guidance_ranks} ranks, but there are {world}; start that number, or "
            "omit one of the options"
        )
    return sequence, guidance_ranks


@dataclass(frozen=True)
class SharedModel:
    """Ranks that generate clips together."""

    # Called like the model, with both guidance branches in one batch.
    model: Callable[..., Tensor]
    ranks: int = 1
    rank: int = 0
    # Rank group of the guidance branches.
    branches: RankGroup = ALONE

    def agree(self, requests: Any) -> None:
        if self.ranks == 1:
            return
        found = gather_objects(hashlib.sha256(repr(requests).encode()).hexdigest())
        for rank, digest in enumerate(found):
            if digest != found[0]:
                raise GulliverError(
                    f"rank {rank} has different requests than rank 0; pass the same requests on "
                    "all ranks"
                )

    def whole(self, sums: Tensor) -> Tensor:
        """Sums [rows, 2] over a sequence's ranks; gathers both branches' rows on all ranks."""
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
    """Lets ranks that need the same clips encode and decode them together (collective)."""
    if dim == "off" or rank_group.size == 1 or not has_networks(autoencoder):
        return None
    return share_autoencoder(autoencoder, rank_group, dim, show if rank_group.rank == 0 else None)


def ranks_alike(place: Any) -> RankGroup:
    """Groups the ranks that pass an equal `place`; returns this rank's group (collective)."""
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
    """Lets all ranks generate each clip together; called once (collective)."""
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
    """Calls a model with this rank's branch of a batch of two, and returns both results."""

    def __init__(self, model: Callable[..., Tensor], rank_group: RankGroup) -> None:
        assert rank_group.size == 2, "guidance has two branches"
        self._model, self._rank_group = model, rank_group

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        of_branch = {n: None if v is None else self._own(v) for n, v in inputs.items()}
        own = self._model(self._own(x), self._own(timestep), **of_branch).contiguous()
        both = own.new_empty(2, *own.shape)
        all_gather(both.view(-1), own.view(-1), self._rank_group.process_group)
        # A process group numbers its ranks in ascending order, as does this rank group.
        return both.flatten(0, 1)

    def _own(self, both: Tensor) -> Tensor:
        return both.chunk(2)[self._rank_group.rank]


def _plan(sequence: int, heads: int) -> SequencePlan:
    """Plans Ulysses within the largest groups that the heads allow, and a ring between groups."""
    ulysses = max(n for n in range(1, sequence + 1) if sequence % n == 0 and n <= heads)
    return SequencePlan(ulysses=ulysses, inner=sequence // ulysses)


# Networks that are loaded from their files on demand, one at a time.


T = TypeVar("T")
CALM = 0.8
"""Fraction of the free memory that a predicted peak may use."""


class SharedDevice:
    """A device on which one network at a time is loaded."""

    def __init__(self, device: torch.device, keep: bool = False) -> None:
        self.device, self.keep = device, keep
        self._parts: list[PipelinePart[Any]] = []

    def part(self, load: Callable[[torch.device], T]) -> PipelinePart[T]:
        made = PipelinePart(self, load)
        self._parts.append(made)
        return made

    def make_way(self, part: PipelinePart[Any]) -> None:
        if self.keep:
            return
        for other in self._parts:
            if other is not part:
                other.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class PipelinePart(Generic[T]):
    """A network of a `SharedDevice`; calling it loads it."""

    def __init__(self, room: SharedDevice, load: Callable[[torch.device], T]) -> None:
        self._room, self._load = room, load
        self._filled: T | None = None
        self.after: Callable[[T], object] | None = None
        """Function called with the network whenever it is loaded."""

    def __call__(self) -> T:
        if self._filled is None:
            self._room.make_way(self)
            self._filled = self._load(self._room.device)
            if self.after is not None:
                self.after(self._filled)
        return self._filled

    def free(self) -> None:
        self._filled = None


class PartEncoder:
    """A text encoder of a `SharedDevice`; encodes each caption once."""

    def __init__(self, part: PipelinePart[TextEncoder], channels: int, max_length: int) -> None:
        self._part = part
        self.channels, self.max_length = channels, max_length
        self._said: dict[str, dict[str, Tensor]] = {}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder; loads the encoder."""
        return self._part().fingerprint

    def encode(self, captions: list[str]) -> EncodedText:
        for caption in dict.fromkeys(captions):
            if caption not in self._said:
                # One at a time: an encoding must not depend on its padding.
                self._said[caption] = encoding_of(self._part().encode([caption]))
        return padded([self._said[caption] for caption in captions])


class PartAutoencoder:
    """An autoencoder of a `SharedDevice`; its weights are loaded on demand."""

    def __init__(self, part: PipelinePart[Any], outline: Any, memory: int | None = None) -> None:
        self.part, self._outline, self._memory = part, outline, memory
        self._peaks: dict[tuple[int, ...], int] = {}
        self.compression, self.latent_channels = outline.compression, outline.latent_channels
        self.latent_shape = outline.latent_shape

    def encode(self, video: Tensor) -> Tensor:
        autoencoder = self.part()
        return autoencoder.encode(video.to(next(autoencoder.parameters()).dtype))

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes latents [B, C, T, H, W] clip by clip, in chunks if memory is short."""
        autoencoder = self.part()
        clips = [self._decoded(autoencoder, one, num_frames) for one in latents.split(1)]
        return torch.cat(clips).float()

    def _decoded(self, autoencoder: Any, latents: Tensor, num_frames: int | None) -> Tensor:
        room = free_memory(latents.device) if self._memory is None else self._memory
        # Samplers and autoencoders each use their own dtype.
        latents = latents.to(next(autoencoder.parameters()).dtype)
        # Networks shared between ranks are already split.
        need = self._peak(autoencoder, latents) if self.part.after is None else 0
        if need <= room:
            return autoencoder.decode(latents, num_frames)
        length = max(1, int(latents.shape[2] * room / need))
        stretches = stream_decode(autoencoder, latents.split(length, dim=2))
        # Finished pieces of the clip are kept in host memory.
        return torch.cat([stretch.cpu() for stretch in stretches], dim=2)

    def _peak(self, autoencoder: Any, latents: Tensor) -> int:
        """Predicts the peak bytes of decoding; 0 if it cannot be traced."""
        shape = tuple(latents.shape)
        if shape not in self._peaks:
            found = activation_peak(_Decoding(autoencoder), (latents,))
            self._peaks[shape] = found.bytes or 0
        return self._peaks[shape]


class _Decoding(nn.Module):
    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder: Any = autoencoder.requires_grad_(False)
        self.eval()

    def forward(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)


def free_memory(device: torch.device) -> int:
    """Returns the largest predicted peak, in bytes, that is safe on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CALM)
    return int(memory_bytes("cpu") * CALM / 2)


# Continues a clip, or connects two clips, with requests of one piece.


def extend(
    model: VideoPipeline,
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
        clip: clip [3, T, H, W] in [-1, 1]; scaled and cropped to the bucket's height and width.
        prompt: sentence that describes the continuation.
        bucket: shape of the sampled piece, which begins with the overlap.
        overlap: number of final frames of the clip that are given (4 k + 1).
        seed: seed of the noise.
        sampling: steps and guidance.
        negative_prompt: negative prompt; empty: no caption.

    Returns:
        The clip followed by the new frames, [3, T + bucket.frames - overlap, height, width].

    Raises:
        GulliverError: the overlap is longer than the clip, or not 4 k + 1.
    """
    check_pixels("the clip", clip)
    if not 1 <= overlap <= clip.shape[1]:
        raise GulliverError(
            f"cannot condition on {overlap} frames of a clip of {clip.shape[1]}; use a smaller "
            "overlap"
        )
    clip = fit(clip.float(), bucket.height, bucket.width)
    model.autoencoder.latent_shape(overlap, bucket.height, bucket.width)
    request = Request(prompt, bucket, seed, clip[:, -overlap:], negative_prompt)
    piece = model.generate([request], sampling)[0]
    return torch.cat([clip, piece[:, overlap:]], dim=1)


def connect(
    model: VideoPipeline,
    first: Tensor,
    last: Tensor,
    prompt: str,
    bucket: Bucket,
    seed: int = 0,
    sampling: SamplingConfig | None = None,
) -> Tensor:
    """Generates a clip that begins with one picture or clip and ends with another.

    Args:
        model: trained model.
        first: picture [3, 1, H, W] or clip [3, 4 k + 1, H, W] in [-1, 1] to begin with; scaled and
            cropped to the bucket's height and width.
        last: picture or clip to end with.
        prompt: sentence that describes the clip.
        bucket: shape of the whole clip.
        seed: seed of the noise.
        sampling: steps and guidance.

    Returns:
        The clip [3, bucket.frames, height, width].

    Raises:
        GulliverError: no frames are left to generate, or the two do not fit the autoencoder.
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

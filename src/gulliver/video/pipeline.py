"""Generates clips with public checkpoints or a run: transformer, autoencoder, text encoder.

    pipeline = VideoPipeline.load("OpenSora-STDiT-v3", "OpenSora-VAE-v1.2", "t5-v1_1-xxl")
    clips = pipeline.generate([Request("a cat on a roof", Bucket(51, 240, 426))])

Models are identified by names and shapes of their tensors, and incompatible parts are rejected
before anything is loaded. Diffusion, steps and guidance are those of the release
(`public_models.py`) or of the run. A pipeline has three networks and loads one at a time: the text
encoder encodes all captions and is freed, then the transformer samples all clips and is freed, then
the autoencoder decodes. With `keep` all stay loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.loading import load
from gulliver.checkpoint.reader import StepReader
from gulliver.data.clips import STILL_FPS, Bucket
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.models.mmdit import MMDiT
from gulliver.models.stdit import STDiT
from gulliver.options import differences, resolved
from gulliver.video.caches import Counts, cache_blocks
from gulliver.video.config import (
    MAY_CHANGE,
    SamplingConfig,
    TrainConfig,
    check_clip,
    parse_shapes,
)
from gulliver.video.diffusion import Guidance, Preview, check_oscillation, guidance_of
from gulliver.video.digits import FPS, MovingDigits
from gulliver.video.flows import IDDPM
from gulliver.video.generation import (
    THREE_BRANCHES,
    PartAutoencoder,
    PartEncoder,
    PipelinePart,
    SharedDevice,
    SharedModel,
    latent_noise,
    ranks_alike,
    share,
    share_coding,
    split_ranks,
)
from gulliver.video.public_models import (
    Denoiser,
    Flow,
    check_latents,
    denoiser_of,
    load_autoencoder,
    load_model,
    outline_model,
    patch_of,
    release_of,
    text_reader,
    text_size,
    told,
)
from gulliver.video.requests import (
    ClipPiece,
    Request,
    check_frames,
    check_request,
    described,
    given_latents,
    loop_prompts,
    made_by_loops,
    parse_mask_strategy,
)
from gulliver.video.run import Run
from gulliver.video.sources import (
    build_model,
    flow_of,
    make_flow,
    make_text,
    own_autoencoder,
)
from gulliver.video.text_encoders import (
    CachedTextEncoder,
    TextEncoder,
    WordEncoder,
    check_encoder,
)


@dataclass(frozen=True)
class Filled:
    """Loaded transformer with the denoiser that samplers call."""

    denoiser: Denoiser
    # The same, on ranks that generate clips together.
    shared: SharedModel


class VideoPipeline:
    """A public transformer with its matching autoencoder and text encoder.

    Args:
        outline: transformer on the meta device.
        load: function that loads it on a device.
        autoencoder: autoencoder with the interface of `gulliver.models.Autoencoder`.
        text: text encoder.
        room: shared device on which networks are loaded.
        fps: frame rate passed to the model; None for that of its release.

    Attributes:
        counts: calls saved by caches in the last `generate`.

    Raises:
        GulliverError: the parts are incompatible.
    """

    def __init__(
        self,
        outline: Any,
        load: Callable[[torch.device], nn.Module],
        autoencoder: Any,
        text: TextEncoder,
        room: SharedDevice,
        fps: float | None = None,
    ) -> None:
        self.outline, self.autoencoder, self.text = outline, autoencoder, text
        self.device, self.release = room.device, release_of(outline)
        self.fps = self.release.fps if fps is None else fps
        self.flow: Flow = self.release.flow(outline, autoencoder.compression)
        self.sampling = SamplingConfig(self.release.steps, self.release.guidance, batch_size=1)
        self.shared = SharedModel(outline)
        self._ranks, self._show = (1, 1), print
        self.counts = Counts()
        self._load, self._keep = load, room.keep
        self._filled: PipelinePart[Filled] = room.part(self._fill)

    @classmethod
    def load(
        cls,
        model: Path | str,
        autoencoder: Path | str,
        text_encoder: Path | str,
        clip: Path | str | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        fps: float | None = None,
        texts: Path | None = None,
        memory: int | None = None,
        keep: bool = False,
        **overrides: Any,
    ) -> Self:
        """Creates a pipeline from folders; only headers and configurations are read.

        Args:
            model: folder, safetensors file or index of the transformer.
            autoencoder: folder or file of the autoencoder.
            text_encoder: folder of the T5.
            clip: folder of the CLIP, for models of 2.0.
            device: device to run on; None for a GPU if available.
            dtype: dtype of the transformer and the text encoders; None for that of the
                transformer's files.
            fps: frame rate passed to the model; None for that of its release.
            texts: folder that caches caption embeddings for other calls; None for no cache.
            memory: bytes available for decoding a clip; None for all free memory.
            keep: whether networks stay loaded for further calls.
            overrides: arguments of the transformer's class, such as ``input_size`` of an STDiT.

        Raises:
            GulliverError: files are missing or not recognized, or parts are incompatible.
        """
        room = SharedDevice(
            device or torch.device("cuda" if torch.cuda.is_available() else "cpu"), keep
        )
        outline = outline_model(model, dtype, **overrides)
        dtype = next(outline.parameters()).dtype
        read = text_reader(outline, text_encoder, clip, dtype)

        def load_texts(device: torch.device) -> TextEncoder:
            return read(device) if texts is None else CachedTextEncoder(read(device), texts)

        def fill(device: torch.device) -> nn.Module:
            return load_model(model, device, dtype, **overrides)

        def load_networks(device: torch.device) -> Any:
            return load_autoencoder(autoencoder).to(device)

        networks: Any = PartAutoencoder(
            room.part(load_networks), load_networks(torch.device("meta")), memory
        )
        width, length = text_size(outline)
        text = PartEncoder(room.part(load_texts), width, length)
        check_latents(outline, networks)
        return cls(outline, fill, networks, text, room, fps)

    @classmethod
    def of(cls, model: nn.Module, autoencoder: Any, text: TextEncoder, **options: Any) -> Self:
        """Creates a pipeline from networks in memory; options as for the class."""
        check_latents(model, autoencoder)
        check_encoder(text, *text_size(model))
        room = SharedDevice(next(model.parameters()).device, keep=True)
        return cls(model, lambda _: model.eval(), autoencoder, text, room, **options)

    def described(self) -> str:
        count = sum(p.numel() for p in self.outline.parameters())
        block = "x".join(map(str, self.autoencoder.compression))
        return (
            f"{self._name} of {self.release.name}, {count / 1e9:.3g} B parameters; "
            f"{self.autoencoder.latent_channels} latent channels for blocks of {block} pixels; "
            f"captions of up to {self.text.max_length} tokens, width {self.text.channels}"
        )

    @property
    def _name(self) -> str:
        return type(self.outline).__name__

    @property
    def _whole_patches(self) -> bool:
        return isinstance(self.outline, MMDiT)

    def share(
        self,
        sequence: int = 0,
        guidance_ranks: int = 0,
        guided: bool = True,
        show: Callable[[str], None] | None = None,
        image_guided: bool = False,
        autoencoder: str = "auto",
    ) -> None:
        """Lets all ranks generate each clip together; called once (collective).

        Afterwards every rank must pass the same requests, and every rank gets all clips.

        Args:
            sequence: number of ranks that share a clip's tokens; 0: all ranks of a guidance branch.
            guidance_ranks: number of ranks for the branches with and without caption; 0: 2 if
                possible.
            guided: whether guidance will be used.
            show: function called on rank 0 with a line about how clips are split.
            image_guided: whether image guidance will be used.
            autoencoder: dim of clips that is split for decoding, "auto" for the predicted fastest,
                or "off" to decode on every rank.

        Raises:
            GulliverError: the sizes do not match the number of ranks, or tokens cannot be shared.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = split_ranks(world, sequence, guidance_ranks, guided, image_guided)
        if sizes[0] > 1 and self.release.name != "Open-Sora 1.2":
            raise GulliverError(
                f"the tokens of {self.release.name}'s {self._name} cannot be split; use --sp-size "
                "1, and at most 2 ranks for --guidance-ranks"
            )
        self._ranks, self._show = sizes, show or (lambda _: None)
        rank = dist.get_rank() if world > 1 else 0
        self.shared = SharedModel(self.outline, world, rank)
        self._filled.free()  # it will be loaded as the ranks share it
        if world > 1:
            everybody = ranks_alike("all")

            def share_networks(networks: Any) -> None:
                share_coding(networks, everybody, autoencoder, show)

            if isinstance(self.autoencoder, PartAutoencoder):
                self.autoencoder.part.after = share_networks
            else:
                share_networks(self.autoencoder)

    def _fill(self, device: torch.device) -> Filled:
        model = self._load(device)
        denoiser = denoiser_of(model)
        if self._ranks == (1, 1):  # Regardless of the world: training samples on a single rank.
            return Filled(denoiser, SharedModel(denoiser))
        return Filled(denoiser, share(model, *self._ranks, call=denoiser, show=self._show))

    def check(self, request: Request, sampling: SamplingConfig | None = None) -> None:
        """Raises an error for a request that this pipeline cannot fulfill."""
        sampling = sampling or self.sampling
        check_request(request, sampling)
        check_oscillation(sampling)
        bucket = request.bucket
        check_clip(bucket.frames, bucket.height, bucket.width)
        sizes = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)[1:]
        steps = self.autoencoder.compression
        if isinstance(self.outline, STDiT) and sizes != self.outline.input_size:
            pairs = zip(self.outline.input_size, steps, strict=True)
            right = "x".join(str(size * step) for size, step in pairs)
            raise GulliverError(
                f"this {self._name} only generates clips of {right}, not of {bucket}"
            )
        patch = patch_of(self.outline)
        if self._whole_patches and (sizes[1] % patch[1] or sizes[2] % patch[2]):
            raise GulliverError(
                f"{bucket} is not divisible into tokens of this {self._name}; use multiples of "
                f"{steps[1] * patch[1]} for the height and of {steps[2] * patch[2]} for the width"
            )
        self._check_given(request)

    def _check_given(self, request: Request) -> None:
        rules = parse_mask_strategy(request.mask_strategy)
        given = request.given is not None or request.loops > 1 or rules
        edited = request.condition_edit or any(rule.edit_ratio for rule in rules)
        if given and self.release.given == "nowhere":
            raise GulliverError(
                f"{self.release.name}'s {self._name} does not support given frames; omit them, or "
                "use a model of Open-Sora 1.1 or later"
            )
        if edited and self.release.name != "Open-Sora 1.2":
            raise GulliverError(
                f"edit ratios need a model of Open-Sora 1.2; with {self.release.name}'s "
                f"{self._name}, use ratio 0"
            )
        check_frames(request, self.autoencoder)

    def fps_of(self, bucket: Bucket) -> float:
        return STILL_FPS if bucket.frames == 1 else self.fps

    def remarks(self, request: Request) -> list[str]:
        """Lists warnings about a request that can be fulfilled."""
        del request
        return []

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig | None = None,
        show: bool = False,
        preview: Preview | None = None,
    ) -> list[Tensor]:
        """Generates clips [3, T, height, width] in [-1, 1], in the order of the requests.

        Each depends only on its own request, up to rounding.

        Args:
            requests: clips to generate.
            sampling: steps and guidance; None for those of the release.
            show: whether to display progress.
            preview: function called after each step of a batch with (steps done, steps, estimate of
                its latents to decode); if it raises, the call ends.

        Raises:
            GulliverError: a request cannot be fulfilled, or a caption is too long.
        """
        sampling = sampling or self.sampling
        for request in requests:
            self.check(request, sampling)
        guidance = self._guidance(sampling)
        self._check_branches(guidance)
        self.shared.agree([described(r) for r in requests] + [sampling])
        self.counts = Counts()
        if not requests:
            return []
        # Before the transformer is loaded, which frees the encoder.
        said = [(p, r.negative_prompt) for r in requests for p in loop_prompts(r.prompt, r.loops)]
        self.text.encode(list({text for p, other in said for text in (p, self._other(p, other))}))

        def sample(pieces: list[ClipPiece]) -> list[Tensor]:
            return self._made(pieces, sampling, guidance, preview)

        unit = self.autoencoder.compression[0]
        # Networks that are loaded in turn are loaded once for all pieces.
        size = sampling.batch_size if self._keep else len(requests)
        return made_by_loops(requests, sample, size, unit, show)

    def _check_branches(self, guidance: Guidance) -> None:
        if self._ranks[1] > 1 and guidance.branches == 3:
            raise GulliverError(
                f"image guidance does not support 2 guidance ranks: {THREE_BRANCHES}"
            )
        if self._ranks[1] > 1 and guidance.branches == 1:
            raise GulliverError(
                "guidance 1 has a single branch, but two guidance ranks share it; share the model "
                "with guidance_ranks=1"
            )

    def _guidance(self, sampling: SamplingConfig) -> Guidance:
        """Returns the guidance of a call; disabled for distilled models, which take it as input."""
        distilled = getattr(self.outline, "guidance_in", None) is not None
        return Guidance() if distilled else guidance_of(sampling)

    @torch.no_grad()
    def _made(
        self,
        pieces: list[ClipPiece],
        sampling: SamplingConfig,
        guidance: Guidance,
        preview: Preview | None,
    ) -> list[Tensor]:
        """Generates pieces of one bucket, either all with or all without given frames."""
        given, mask = given_latents(pieces, self.autoencoder, self.device)
        latents = list[Tensor]()
        for rows in self._batches(pieces, mask, sampling.batch_size):
            part = slice(rows[0], rows[-1] + 1)
            own = (None, None) if given is None or mask is None else (given[part], mask[part])
            latents.append(self._latents(pieces[part], sampling, guidance, preview, *own))
        frames = pieces[0].bucket.frames
        clips = (self.autoencoder.decode(each, frames).clamp(-1, 1).cpu() for each in latents)
        return [clip for made in clips for clip in made.unbind()]

    def _batches(
        self, pieces: Sequence[ClipPiece], mask: Tensor | None, size: int
    ) -> Iterator[list[int]]:
        """Yields indices of pieces to sample together, with equal given frames for some models."""
        run = list[int]()
        for row in range(len(pieces)):
            apart = (
                run
                and mask is not None
                and self.release.given == "beside"
                and not torch.equal(mask[row], mask[run[-1]])
            )
            if apart or len(run) == size:
                yield run
                run = []
            run.append(row)
        yield run

    def _latents(
        self,
        pieces: list[ClipPiece],
        sampling: SamplingConfig,
        guidance: Guidance,
        preview: Preview | None,
        given: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        filled, bucket = self._filled(), pieces[0].bucket
        shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        like = filled.denoiser.like(self.device)
        noise = torch.stack([latent_noise(piece.seed, shape) for piece in pieces]).to(like)
        captions, null = self._captions(pieces, filled.denoiser)
        inputs: dict[str, Any] = {
            **captions,
            **told(bucket, self.fps_of(bucket), like.expand(len(pieces))),
            "strength": like.expand(len(pieces)) * sampling.guidance,
        }
        if given is None:  # The first of several loops: nothing is given yet.
            guidance = replace(guidance, image=1.0)
        options: dict[str, Any] = {"preview": preview}
        held: Tensor | None = None
        if self.release.given == "beside" and mask is not None:
            held = mask < 1
            inputs |= {"latents": given, "held": held}
            options["imageless_inputs"] = {"held": torch.zeros_like(held)}
        else:
            options |= {"given": None if given is None else given.to(like), "mask": mask}
        if isinstance(self.flow, IDDPM):

            def step_noise(number: int) -> Tensor:
                drawn = [latent_noise(derive(piece.seed, 6, number), shape) for piece in pieces]
                return torch.stack(drawn)

            options["step_noise"] = step_noise
        whole = filled.shared.whole
        with cache_blocks(filled.denoiser.model, sampling.step_cache, whole) as cache:
            latents = self.flow.sample(
                filled.shared.model,
                noise,
                inputs,
                null_inputs=null,
                steps=sampling.steps,
                cfg_scale=guidance,
                **options,
            )
        self.counts.add(cache.counts)
        if held is not None and given is not None:
            latents = torch.where(held[:, None, :, None, None], given.to(latents), latents)
        return latents

    def _captions(
        self, pieces: list[ClipPiece], denoiser: Denoiser
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        prompts = [piece.prompt for piece in pieces]
        others = [self._other(piece.prompt, piece.negative_prompt) for piece in pieces]
        text = self.text.encode([*prompts, *others])
        said = {"y": text.embeddings, "mask": text.mask}
        if text.vector is not None:
            said["vector"] = text.vector
        said = {name: value.to(self.device) for name, value in said.items()}
        count = len(pieces)
        captions, null = ({n: v[rows] for n, v in said.items()} for rows in _halves(count))
        if denoiser.nothing is not None:
            rows = [n for n, piece in enumerate(pieces) if not piece.negative_prompt]
            null["y"][rows] = denoiser.nothing[: null["y"].shape[2]].to(null["y"])
        return captions, null

    def _other(self, prompt: str, negative: str) -> str:
        # An STDiT has a learned embedding for it, with the length of the caption.
        return negative or ("" if self.release.whole else prompt)


def _halves(count: int) -> tuple[slice, slice]:
    return slice(count), slice(count, None)


class VideoModel(VideoPipeline):
    """A run of `gulliver train` with word captions: transformer (averaged weights) and autoencoder.

    Args:
        config: configuration of the run.
        model: transformer.
        autoencoder: autoencoder of its latents.
        fps: frame rate of its training clips, passed to the model.

    Attributes:
        counts: calls saved by caches in the last `generate`.
    """

    def __init__(self, config: TrainConfig, model: Any, autoencoder: Any, fps: float = FPS) -> None:
        words = WordEncoder(config.model.text_channels, config.model.text_length)
        room = SharedDevice(next(model.parameters()).device, keep=True)
        super().__init__(model, lambda _: model.eval(), autoencoder.eval(), words, room, fps)
        self.config, self.model = config, model.eval()
        self.flow = flow_of(model, make_flow(config.flow, autoencoder))
        self.sampling = SamplingConfig()
        known = MovingDigits.vocabulary if config.data.made else None
        self.known_words: frozenset[str] | None = known

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> Self:  # type: ignore[override]
        """Loads the newest checkpoint of a run folder.

        Raises:
            GulliverError: there is no run or checkpoint, or the checkpoint has another
                configuration.
        """
        model = open_run(folder, device)
        if not isinstance(model, cls):
            raise GulliverError(
                f"{folder} is a run with a public model or text encoder; open it with "
                "gulliver.video.pipeline.open_run, as `gulliver generate` does"
            )
        return model

    @property
    def _whole_patches(self) -> bool:
        """Whether clips must be whole patches, because padding did not occur in training."""
        return True

    def fps_of(self, bucket: Bucket) -> float:
        return self.fps if self.config.data.made else super().fps_of(bucket)

    def remarks(self, request: Request) -> list[str]:
        remarks = []
        if self.known_words is not None:
            texts = [*loop_prompts(request.prompt, request.loops), request.negative_prompt]
            words = " ".join(dict.fromkeys(texts)).lower().split()
            strange = [word for word in words if word.strip(".,;!?") not in self.known_words]
            if strange:
                names = ", ".join(repr(word) for word in strange)
                remarks.append(
                    f"{names} did not occur in training, so the result of {request.prompt!r} will "
                    f"be poor (known: {', '.join(sorted(self.known_words))})"
                )
        shapes = parse_shapes(self.config.data.shapes)
        if request.bucket not in shapes and self.config.data.buckets is None:
            known = ", ".join(map(str, shapes))
            remarks.append(f"{request.bucket} is not a trained shape (trained: {known})")
        return remarks


def open_run(folder: Path, device: torch.device | None = None) -> VideoPipeline:
    """Opens a run for sampling: a `VideoModel`, or a pipeline of the published parts it trained."""
    run = Run(folder)
    config, checkpoint = run.read_config(), run.newest_checkpoint()
    with StepReader(checkpoint) as reader:
        trained = reader.value("run")["config"]
    changed = differences(trained, resolved(config), MAY_CHANGE)
    if changed:
        raise GulliverError(f"{checkpoint} has another configuration: {'; '.join(changed)}")
    autoencoder = own_autoencoder(run)
    if autoencoder is None:
        raise GulliverError(f"{folder} has no autoencoder; train it again, or restore the file")
    model = build_model(config, autoencoder, run)
    load(checkpoint, {"ema": model})
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = model.to(device), autoencoder.to(device).eval()
    if not config.model.public:
        # Runs on the digits do not have this file.
        told = read_json(run.clips_path)["fps"] if run.clips_path.is_file() else FPS
        return VideoModel(config, *parts, told)
    pipeline = VideoPipeline.of(*parts, make_text(config, model))
    pipeline.flow = flow_of(model, make_flow(config.flow, autoencoder))
    return pipeline

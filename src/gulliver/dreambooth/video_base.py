"""A run of `gulliver train` as a DreamBooth base: a digits model or fine-tuned published weights.

Images train only the spatial half of the transformer. Motion is in the temporal blocks, which see
a still as a single frame: adapters there would learn noise and forget motion. Clips and stills
share one tensor, see `_padded`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gulliver._compat import fake_kind
from gulliver.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from gulliver.comm.collectives import barrier
from gulliver.comm.world import World, init_world
from gulliver.data.clips import Bucket
from gulliver.dreambooth.base import Picture, TokenHandle, TrainedParts, check_adapter
from gulliver.dreambooth.config import DreamboothConfig, alternatives
from gulliver.dreambooth.pictures import prior_folder, read_pictures, write_pixels
from gulliver.errors import GulliverError
from gulliver.finetune.adapters import adapter_name
from gulliver.io.files import named_errors, write_text
from gulliver.jobs.display import Display
from gulliver.jobs.log import derive
from gulliver.jobs.loop import Outcome
from gulliver.video.config import SamplingConfig, parse_shapes
from gulliver.video.digits import FPS
from gulliver.video.media import fit, to_frames
from gulliver.video.pipeline import VideoModel, VideoPipeline, open_run
from gulliver.video.requests import Request
from gulliver.video.text_encoders import EncodedText, WordEncoder, encoding_of, padded, words_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS, WHOLE = "learned_embeds.safetensors", "model.safetensors"
PREFIX = "base_model.model."
"""Name prefix in PEFT's files."""


# [Note: words of the digits model] Its text encoder has no embedding table: each word has a fixed
# vector, derived from its letters. So a new word starts with such a vector, which is then trained.
#
# How stills become clips: see `in_motion`.
class TrainedWords(nn.Module):
    """A word encoder with one trainable word vector."""

    def __init__(self, words: WordEncoder, token: str, row: Tensor) -> None:
        super().__init__()
        self.words, self.token = words, token
        self.channels, self.max_length = words.channels, words.max_length
        self.rows = nn.Parameter(row)

    @property
    def fingerprint(self) -> str:
        return self.words.fingerprint

    def forward(self, captions: list[str]) -> EncodedText:
        # Read at each call: sharded parameters are only whole during the call.
        self.words.teach(self.token, self.rows[0])
        return self.words.encode(captions)

    def encode(self, captions: list[str]) -> EncodedText:
        return self(captions)


class VideoBase:
    """A run of `gulliver train` as a DreamBooth base model."""

    text_targets: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        resolution: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        sampling_steps: int = 24,
        guidance: float | None = None,
        on_meta: bool = False,
    ) -> None:
        self.device, self.dtype, self.on_meta = device or torch.device("cpu"), dtype, on_meta
        self.maker = open_run(folder, self.device)
        self.config = read_json(folder / "config.json")
        shapes = parse_shapes(tuple(self.config["data"]["shapes"]))
        usual = max(shapes, key=lambda one: shapes[one])
        self.bucket = _resized(usual, resolution, self.maker.autoencoder)
        self.fingerprint = fingerprint_of(self.maker)
        self.trained = self.maker.outline.to(dtype).requires_grad_(False)
        if on_meta:
            self.trained.to("meta")
        self.sampling = SamplingConfig(
            sampling_steps, SamplingConfig.guidance if guidance is None else guidance
        )
        self.text: nn.Module | None = None
        self.targets = spatial_layers(self.trained)
        self._told: dict[str, dict[str, Tensor]] = {}

    @property
    def side(self) -> str:
        return str(self.bucket)

    def add_token(self, token: str, initial: str | None) -> TokenHandle:
        words = self.maker.text
        if not isinstance(words, WordEncoder):
            raise GulliverError(
                "the text encoder of this run is frozen; omit --learn-token and use a rare word as "
                "--token"
            )
        known = getattr(self.maker, "known_words", None)
        strange = [w for w in words_of(initial or token) if initial and known and w not in known]
        if strange or len(words_of(token)) != 1 or words_of(token)[0] != token:
            raise GulliverError(
                f"--initial {strange[0]!r} is not in the vocabulary of the base model"
                if strange
                else f"--token {token!r} must be a single word in lower-case letters"
            )
        if known is not None and token in known:
            raise GulliverError(f"--token {token} is already in the base model's vocabulary")
        row = torch.stack([words.vector(word) for word in words_of(initial or token)])
        self.text = TrainedWords(
            words, token, row.mean(0, keepdim=True).to(self.device, self.dtype)
        )
        cast(Any, self.maker).text = self.text
        if known is not None:
            cast(Any, self.maker).known_words = known | {token}
        return TokenHandle(token, (0,), self.text.rows)

    def encode_prompts(self, texts: Sequence[str], train_text: bool) -> None:
        """Encodes all prompts once, if the words are not trained."""
        said = [text for text in dict.fromkeys(texts) if text]
        self._told = {}
        if self.text is None:
            if train_text:
                self.add_token("", None)  # raises an error
            # One at a time: an encoding must not depend on the other prompts.
            self._told = {text: encoding_of(self.maker.text.encode([text])) for text in said}
        else:
            self.text(said or ["nothing"])

    def _encoded(self, texts: Sequence[str], like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns vectors ``[N, 1, L, D]`` and mask ``[N, L]`` of prompts."""
        if self.text is not None:
            vectors, mask = self.text(list(texts))[:2]
            return vectors.to(like), mask.to(like.device)
        for text in dict.fromkeys(texts):
            if text not in self._told:
                self._told[text] = encoding_of(self.maker.text.encode([text]))
        vectors, mask = padded([self._told[text] for text in texts])[:2]
        return vectors.to(like), mask.to(like.device)

    @torch.no_grad()
    def encode_pictures(self, pictures: Sequence[Picture]) -> Tensor:
        """Encodes stills and clips to latents ``[N, C, T, H, W]``, padded with NaN frames."""
        bucket, unit = self.bucket, self.maker.autoencoder.compression[0]
        found = list[Tensor]()
        for picture in pictures:
            pixels = picture.pixels if picture.pixels.ndim == 4 else picture.pixels[None]
            frames = min(bucket.frames, (len(pixels) - 1) // unit * unit + 1)
            video = torch.from_numpy(pixels[:frames]).permute(3, 0, 1, 2).float() / 127.5 - 1
            fitted = fit(video, bucket.height, bucket.width)[None].to(self.device)
            found.append(self.maker.autoencoder.encode(fitted)[0])
        return _padded(found).to(next(self.trained.parameters()).dtype)

    def example(self, count: int) -> Tensor:
        bucket = self.bucket
        shape = self.maker.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        dtype = next(self.trained.parameters()).dtype
        return torch.empty(count, *shape, dtype=dtype, device="meta")

    def loss(
        self, latents: Tensor, texts: Sequence[str], generators: Sequence[torch.Generator]
    ) -> Tensor:
        lengths = [latents.shape[2]] * len(latents)
        if not _without_values(latents):
            lengths = latents[:, 0, :, 0, 0].isfinite().sum(1).tolist()
        found: dict[int, Tensor] = {}
        for length in dict.fromkeys(lengths):
            rows = [row for row, one in enumerate(lengths) if one == length]
            losses = self._alike(
                latents[rows, :, :length],
                [texts[row] for row in rows],
                [generators[row] for row in rows],
            )
            found.update(zip(rows, losses, strict=True))
        return torch.stack([found[row] for row in range(len(latents))])

    def _alike(
        self, latents: Tensor, texts: Sequence[str], generators: Sequence[torch.Generator]
    ) -> Tensor:
        flow: Any = self.maker.flow
        latents = latents if _without_values(latents) else latents.to(self.device)
        bucket, share = self.bucket, float(self.config["flow"]["drop_caption"])
        clip = {"height": bucket.height, "width": bucket.width, "num_frames": latents.shape[2]}
        times, noise, drop = list[Tensor](), list[Tensor](), list[Tensor]()
        for generator in generators:
            times.append(flow.sample_timesteps(1, generator=generator, **clip))
            noise.append(torch.randn(latents.shape[1:], generator=generator))
            drop.append(torch.rand(1, generator=generator) < share)
        vectors, mask = self._encoded(texts, latents)
        ones = latents.new_ones(len(latents))
        # The model needs these numbers as values, which tensors on meta do not have.
        real = torch.ones(len(latents), device=self.device)
        inputs: dict[str, Any] = {
            "y": vectors,
            "mask": mask,
            "fps": ones * getattr(self.maker, "fps", FPS),
            "height": real * bucket.height,
            "width": real * bucket.width,
            "drop_caption": torch.cat(drop).to(latents.device),
        }
        if "num_frames" in _taken(self.trained):
            frames = (latents.shape[2] - 1) * self.maker.autoencoder.compression[0] + 1
            inputs |= {"num_frames": ones * frames, "ar": ones * bucket.height / bucket.width}
        return flow.loss(
            self.trained,
            latents,
            inputs,
            noise=torch.stack(noise).to(latents),
            timesteps=torch.cat(times).to(latents.device),
        )

    @torch.no_grad()
    def sample(self, texts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        asked = zip(texts, seeds, strict=True)
        requests = [Request(text, self.bucket, seed) for text, seed in asked]
        return [to_frames(clip) for clip in self.maker.generate(requests, self.sampling)]

    def moved(self, still: np.ndarray, text: str, seed: int, placed: bool) -> np.ndarray:
        first = torch.from_numpy(still)[None].permute(3, 0, 1, 2).float() / 127.5 - 1
        first = fit(first, self.bucket.height, self.bucket.width)
        request = Request(text, self.bucket, seed, given=None if placed else first)
        (clip,) = self.maker.generate([request], self.sampling)
        return to_frames(along(first, clip) if placed else clip)

    def read_adapter(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
        """Reads adapters to continue training, and restores the vector of a trained word."""
        if not (path / CONFIG).is_file():
            raise GulliverError(f"--adapter {path} has no {CONFIG}; pass a folder with adapters")
        if (path / EMBEDDINGS).is_file() and isinstance(self.text, TrainedWords):
            rows = read_tensors(path / EMBEDDINGS)
            if self.text.token in rows and not self.text.rows.is_meta:
                self.text.rows.data.copy_(rows[self.text.token])
        values = read_json(path / CONFIG)
        tensors = {
            f"trained.{name.removeprefix(PREFIX)}": value
            for name, value in read_tensors(path / WEIGHTS).items()
        }
        return tensors, {"trained": values}

    def save(self, folder: Path, learnt: TrainedParts) -> None:
        """Writes adapters in PEFT's format, the vector of a trained word, or all weights."""
        own = {name: name for name in learnt.tensors if ".lora_" in name}
        if own:
            tensors = {
                PREFIX + adapter_name(name.removeprefix("trained.")): learnt.tensors[name]
                for name in own
            }
            write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
            write_json(folder / CONFIG, dict(learnt.adapters["trained"]))
        rows = {token.token: learnt.tensors["text.rows"] for token in learnt.tokens}
        if rows:
            write_tensors(folder / EMBEDDINGS, rows, {"format": "pt"})
        if learnt.method == "full":
            names = [name for name in learnt.tensors if name.startswith("trained.")]
            learnt.write(folder / WHOLE, {name.removeprefix("trained."): name for name in names})


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter, computed as in PEFT."""

    def __init__(self, layer: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down, self.up = (nn.Parameter(one.to(layer.weight), False) for one in (down, up))

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return self.layer(x) + low * self.scale


def load_adapter(maker: VideoPipeline, folder: Path) -> None:
    """Loads weights trained by `gulliver dreambooth` into an opened run."""
    found = [name for name in (WEIGHTS, WHOLE, EMBEDDINGS) if (folder / name).is_file()]
    if not found:
        raise GulliverError(
            f"--adapter {folder} was not written by `gulliver dreambooth`; pass the folder "
            "`result` of its run"
        )
    network = maker.outline
    tensors = read_tensors(folder / WEIGHTS) if WEIGHTS in found else {}
    values = read_json(folder / CONFIG) if tensors else {}
    placed = _placed(network, tensors, folder)  # raises before anything is changed
    check_adapter(folder, fingerprint_of(maker))
    if WHOLE in found:
        network.load_state_dict(read_tensors(folder / WHOLE), strict=False)
    scale = float(values.get("lora_alpha") or 1) / float(values.get("r") or 1)
    for path, (layer, down, up) in placed.items():
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, LowRank(layer, down, up, scale))
    for token, rows in read_tensors(folder / EMBEDDINGS).items() if EMBEDDINGS in found else ():
        assert isinstance(maker, VideoModel), "a text encoder of words"
        text: Any = maker.text  # a `WordEncoder`
        text.teach(token, rows[0])
        if maker.known_words is not None:
            maker.known_words |= {token}


def _placed(
    network: nn.Module, tensors: Mapping[str, Tensor], folder: Path
) -> dict[str, tuple[nn.Linear, Tensor, Tensor]]:
    found: dict[str, tuple[nn.Linear, Tensor, Tensor]] = {}
    layers = dict(network.named_modules())
    for name, down in tensors.items():
        path, dot, _ = name.removeprefix(PREFIX).rpartition(".lora_A.")
        if not dot:
            continue
        layer, up = layers.get(path), tensors[name.replace(".lora_A.", ".lora_B.")]
        if not isinstance(layer, nn.Linear) or (up.shape[0], down.shape[1]) != layer.weight.shape:
            there = tuple(layer.weight.shape) if isinstance(layer, nn.Linear) else "missing"
            raise GulliverError(
                f"--adapter {folder} is for another base model: it adapts {path} of shape "
                f"{(up.shape[0], down.shape[1])}, but here that is {there}"
            )
        found[path] = layer, down, up
    return found


def spatial_layers(network: nn.Module) -> tuple[str, ...]:
    return tuple(
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in path and "temp" not in path
    )


def fingerprint_of(maker: VideoPipeline) -> str:
    """Computes a digest of a run's networks and words, from a few elements of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for network in (maker.outline, maker.autoencoder):
        for name, value in sorted(network.state_dict().items()):
            part = value.detach().reshape(-1)[:: max(1, value.numel() // 256)].double().cpu()
            digest.update(f"{name} {tuple(value.shape)}".encode() + part.numpy().tobytes())
    digest.update(maker.text.fingerprint.encode())
    return digest.hexdigest()


def along(still: Tensor, clip: Tensor) -> Tensor:
    """Moves an image along the positions at which it correlates best with a clip's frames."""
    # A subject that changes its appearance makes the best position jitter, so the picture follows a
    # parabola fitted to all of them. Its edges are extended.
    height, width = still.shape[2:]
    one, others = (levels.mean(0) for levels in (still, clip))
    spectra = [torch.fft.rfft2(x - x.mean((-2, -1), keepdim=True)) for x in (one, others)]
    fits = torch.fft.irfft2(spectra[0].conj() * spectra[1], s=(height, width))
    best = fits.flatten(1).argmax(1)
    places = np.stack([(best // width).numpy(), (best % width).numpy()], 1).astype(float)
    # A circular shift beyond half of the picture is the shorter shift to the other side.
    for axis, size in enumerate((height, width)):
        first = (places[0, axis] + size // 2) % size - size // 2
        places[:, axis] = np.unwrap([first, *places[1:, axis]], period=size)
    times = np.arange(len(places))
    curve = np.polynomial.polynomial.polyfit(times, places, min(2, len(places) - 1))
    smooth = np.polynomial.polynomial.polyval(times, curve).T.round()
    frames = []
    for down, right in smooth.astype(int).tolist():
        rows = (torch.arange(height) - down).clamp(0, height - 1)
        columns = (torch.arange(width) - right).clamp(0, width - 1)
        frames.append(still[:, :, rows][..., columns])
    return torch.cat(frames, 1)


def _taken(network: nn.Module) -> frozenset[str]:
    import inspect

    return frozenset(inspect.signature(network.forward).parameters)


def _without_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, fake_kind())


def _padded(latents: Sequence[Tensor]) -> Tensor:
    """Stacks latents ``[C, T, H, W]``, padded with NaN to the maximum length."""
    longest = max(one.shape[1] for one in latents)
    first = latents[0]
    shape = (len(latents), first.shape[0], longest, *first.shape[2:])
    found = first.new_full(shape, float("nan"))
    for row, one in enumerate(latents):
        found[row, :, : one.shape[1]] = one
    return found


def _resized(bucket: Bucket, side: int | None, autoencoder: Any) -> Bucket:
    """Returns a bucket of the same aspect ratio with the area of a `side` x `side` square."""
    if side is None:
        return bucket
    ratio = side / (bucket.height * bucket.width) ** 0.5
    steps = [2 * one for one in autoencoder.compression[1:]]
    sides = (bucket.height, bucket.width)
    height, width = (
        max(step, round(n * ratio / step) * step) for n, step in zip(sides, steps, strict=True)
    )
    return Bucket(bucket.frames, height, width)


# Animates pictures with a video base, to learn a moving subject from stills.


Teach = Callable[[DreamboothConfig, Any], Outcome]


# [Note: why stills are not enough] A still shows the subject in a single frame, which corresponds
# to the first latent frame of a clip only: the others hold several frames each and look different.
# A base trained on stills alone shows the subject at first and something else later in the clip. So
# it is also trained on clips with motion that it already knows: it continues a picture as the first
# frame, prompted with a motion. Its own clips drift away from the subject too, and limit the
# quality of later frames. If the subject has a plain background, the picture itself is moved
# instead, following the subject in the base's own clip of that prompt (`along`): every frame shows
# the subject. Only the prompts describe motion.
#
# Each of the two phases is a run in a subfolder, so that both can be resumed.
#
# run/
#   stills/  the run on the pictures alone
#   motion/  pictures and the clips made from them, with captions
#   clips/   the run on those, which continues the adapters of the first
#   result/  the trained weights
def in_motion(config: DreamboothConfig, teach: Teach, plugin: Any = None) -> Outcome:
    """Trains on images, then on clips that the base model makes from them."""
    assert config.model is not None, "--motion is set"
    if not (config.model / "checkpoints").is_dir():
        raise GulliverError(
            f"--motion only applies to a run of `gulliver train`, which --model {config.model} is "
            "not; omit --motion"
        )
    world = init_world()
    half = replace(
        config,
        motion="",
        motion_after=None,
        motion_clips=DreamboothConfig.motion_clips,
        motion_placed=False,
        prior_folder=prior_folder(config) if config.priors else None,
    )
    steps = config.still_steps
    first = teach(replace(half, out=config.out / "stills", steps=steps), plugin)
    if first.result is None:
        return first
    folder = _moved(config, first.result, world)
    second = replace(
        half,
        out=config.out / "clips",
        subject=folder,
        adapter=first.result,
        steps=config.steps - steps,
        # Fixed by the adapters that are continued.
        lora_rank=DreamboothConfig.lora_rank,
        lora_alpha=None,
        lora_targets=(),
    )
    found = teach(second, plugin)
    if found.result is None:
        return Outcome(steps + found.step, False, first.seconds + found.seconds)
    result = config.out / "result"
    if world.is_main and not result.is_dir():
        partial = config.out / ".result.partial"
        with named_errors(result):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(found.result, partial)
            os.replace(partial, result)
    barrier()
    return Outcome(config.steps, True, first.seconds + found.seconds, result=result)


def _moved(config: DreamboothConfig, adapter: Path, world: World) -> Path:
    """Generates missing clips in the folder of images and clips (collective)."""
    folder, usual = config.out / "motion", config.filled(config.prompt)
    pictures = read_pictures(config, lambda _: None)
    texts = alternatives(config.filled(config.motion))
    stems = [folder / f"clip-{number:05d}" for number in range(config.motion_clips)]
    # The caption is written after the clip and marks it as complete.
    missing = [n for n, stem in enumerate(stems) if not stem.with_suffix(".txt").is_file()]
    if world.is_main:
        with named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            stem = folder / f"picture-{number:05d}"
            write_pixels(stem, picture.pixels)
            write_text(stem.with_suffix(".txt"), picture.text or usual)
    barrier()
    mine = missing[world.rank :: world.size]
    if mine:
        assert config.model is not None, "--motion is set"
        base = open_video(config, world.device, torch.float32)
        load_adapter(base.maker, adapter)
        placed = config.motion_placed
        with Display("--motion", len(mine), 0, world.is_main) as display:
            for number in mine:
                text = texts[number // len(pictures) % len(texts)]
                still = pictures[number % len(pictures)].pixels
                seed = derive(config.seed, 9, number) % 2**32
                write_pixels(stems[number], base.moved(still, text, seed, placed))
                write_text(stems[number].with_suffix(".txt"), text)
                display.advance()
    barrier()
    return folder


def open_video(
    config: DreamboothConfig, device: torch.device, dtype: torch.dtype, on_meta: bool = False
) -> VideoBase:
    assert config.model is not None, "--model is set"
    return VideoBase(
        config.model,
        config.resolution,
        device,
        dtype,
        config.sampling_steps,
        config.guidance,
        on_meta,
    )

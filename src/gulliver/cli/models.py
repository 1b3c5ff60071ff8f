"""``gulliver models``: sizes and predicted memory of public video models and autoencoders.

Autoencoders are traced with fake tensors, for a full clip and for one chunk of a stream. Classes of
diffusers, which is optional, are listed with tabulated values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.cli.options import ModelsConfig
from gulliver.errors import GulliverError, UsageError, nearest
from gulliver.hardware.probe import current_cluster, memory_bytes
from gulliver.jobs.display import print_json, report_console, working
from gulliver.memory.symbolic import activation_peak
from gulliver.models.autoencoders import AUTOENCODERS, build_autoencoder
from gulliver.models.clips import token_positions
from gulliver.models.configurations import CONFIGURATIONS, build
from gulliver.options import size_text


@dataclass(frozen=True)
class CoderNeeds:
    """Sizes of an autoencoder: bytes of weights and activations."""

    release: str
    # Frames, rows and columns of pixels per latent.
    compression: tuple[int, int, int]
    latent_channels: int
    # Frames, height and width of the decoded clip.
    clip: tuple[int, int, int]
    # Number of parameters; None for classes of diffusers.
    parameters: int | None = None
    # Bytes to decode the clip at once.
    decode: int | None = None
    # Bytes to decode it in chunks.
    stream: int | None = None


def coder_needs(name: str, config: ModelsConfig) -> CoderNeeds:
    """Predicts the memory to decode a clip, without allocating it."""
    known = AUTOENCODERS[name]
    asked = (config.frames, config.height, config.width)
    frames, height, width = (u if a is None else a for u, a in zip(known.clip, asked, strict=True))
    told = (known.release, known.compression, known.latent_channels, (frames, height, width))
    if known.of_diffusers:
        return CoderNeeds(*told)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    # At once: without the chunking quirk, if the model has it.
    plain = {} if known.compression[0] == 1 else {"compat": ()}
    with torch.device("meta"):
        whole: Any = build_autoencoder(name, **plain).to(dtype).eval()
        pieces: Any = build_autoencoder(name)
    latents = whole.latent_shape(frames, height, width)
    step = pieces.latent_shape(min(frames, getattr(pieces, "micro_frames", 1)), height, width)
    count = sum(p.numel() for p in whole.parameters())
    weights = count * dtype.itemsize
    peaks = [
        weights + _decode_peak(name, whole, config.batch_size, shape, dtype)
        for shape in (latents, step)
    ]
    return CoderNeeds(*told, count, *peaks)


class _Decoding(nn.Module):
    """A decoder that saves no tensors for backward."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(latents)


def _decode_peak(
    name: str, model: Any, batch: int, shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    decoder = model.networks["decoder"] if hasattr(model, "networks") else model.decoder
    latents = torch.empty(batch, *shape, dtype=dtype, device="meta")
    found = activation_peak(_Decoding(decoder).requires_grad_(False).eval(), (latents,))
    if found.bytes is None:
        raise GulliverError(f"{name} cannot be traced: {found.reason}")
    return found.bytes


def show_coders(found: Mapping[str, CoderNeeds], config: ModelsConfig, room: int) -> None:
    rows = []

    def shown(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{size_text(nbytes)}{'' if nbytes <= room else ' !'}"

    for name, one in found.items():
        count = "-" if one.parameters is None else f"{one.parameters / 1e6:.0f} M"
        sizes = ("x".join(map(str, one.compression)), str(one.latent_channels))
        clip = "x".join(map(str, one.clip))
        rows.append((name, one.release, count, *sizes, clip, shown(one.decode), shown(one.stream)))
    _print_table(
        ("", "used by", "parameters", "compression", "channels", "clip", "decode", "streamed"),
        rows,
        f"{config.dtype}, batch {config.batch_size}; decode: the clip as one, streamed: piece by "
        "piece; -: a class of diffusers, an extra",
    )


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], footer: str) -> None:
    console = report_console()
    table = Table()
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(footer)


# ``gulliver models``: the public video models, and the memory that each needs here.
#
# `models.py` has the memory of autoencoders.
#
# State is that of a plan for one rank; activations are traced with fake tensors, with one and with
# two blocks of each kind: every further block of a kind adds the same amount.


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COUNTS = ("depth", "depth_single_blocks")
"""Configuration fields that count blocks."""
BLOCKS = ("blocks", "spatial_blocks", "temporal_blocks", "double_blocks", "single_blocks")


@dataclass(frozen=True)
class Needs:
    """Memory that a model needs for a clip, in bytes."""

    parameters: int
    # Video tokens of a clip.
    tokens: int
    # Training with all activations kept.
    train: int
    # Training with recomputed blocks.
    train_recomputed: int
    # Sampling, with and without the prompt in one batch.
    sample: int


def models_command(config: ModelsConfig) -> int:
    known = (*CONFIGURATIONS, *AUTOENCODERS)
    for name in config.names:
        if name not in known:
            raise UsageError(f"unknown model {name!r}: {nearest(name, known)}")
    names = [name for name in config.names or known if name in CONFIGURATIONS]
    coders = [name for name in config.names or known if name in AUTOENCODERS]
    clips = {name: clip_of(name, config) for name in names}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, sizes = dict[str, Needs](), dict[str, CoderNeeds]()
    with working("predicting memory") as progress:
        for number, name in enumerate((*names, *coders)):
            progress(f"{name}, {number + 1} of {len(names) + len(coders)}")
            if name in clips:
                found[name] = needs(name, clips[name], config)
            else:
                sizes[name] = coder_needs(name, config)
    if config.json:
        listed = {name: vars(one) for name, one in sizes.items()}
        print_json({**_plain(found, clips, device), "autoencoders": listed})
        return 0
    if found:
        _show(found, clips, config, device)
    if sizes:
        show_coders(sizes, config, memory_bytes(device))
    return 0


def clip_of(name: str, config: ModelsConfig) -> tuple[int, int, int]:
    """Returns frames, height and width in pixels: as requested, or the model's defaults."""
    usual = CONFIGURATIONS[name].clip
    asked = (config.frames, config.height, config.width)
    clip = tuple(u if a is None else a for u, a in zip(usual, asked, strict=True))
    fixed = CONFIGURATIONS[name].fields.get("input_size")
    if fixed is not None and CONFIGURATIONS[name].latent(*clip) != fixed:
        if config.names:
            raise UsageError(
                f"{name} only accepts clips of {'x'.join(map(str, usual))}; omit --frames, "
                "--height and --width"
            )
        return usual
    frames, height, width = clip
    return frames, height, width


def needs(name: str, clip: tuple[int, int, int], config: ModelsConfig) -> Needs:
    with torch.device("meta"):
        model = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    precision = None if config.dtype == "fp32" else config.dtype
    plugin = LowLevelZeroPlugin(stage=1, precision=precision, verbose=False)
    state = plugin.make_plan(model, optimizer, current_cluster(1)).memory
    states = state.parameters + state.gradients + state.optimizer_state
    peak = partial(_peak, name, clip, DTYPES[config.dtype])
    count = sum(p.numel() for p in model.parameters())
    return Needs(
        parameters=count,
        tokens=tokens_of(name, clip),
        train=states + peak(config.batch_size, train=True),
        train_recomputed=states + peak(config.batch_size, train=True, again=True),
        sample=count * DTYPES[config.dtype].itemsize + peak(2, train=False),
    )


def _peak(
    name: str,
    clip: tuple[int, int, int],
    dtype: torch.dtype,
    batch: int,
    train: bool,
    again: bool = False,
) -> int:
    """Peak bytes of activations, extrapolated from models with one and two blocks of each kind."""
    whole = _fields(name)

    def followed(counts: Mapping[str, int]) -> int:
        with torch.device("meta"):
            model = build(name, **counts).to(dtype).train(train)
        model.requires_grad_(train)
        prepare = _recompute if again else lambda _: None
        inputs = inputs_of(name, clip, batch, dtype)
        found = activation_peak(model, (), inputs, prepare=prepare)
        if found.bytes is None:
            raise GulliverError(f"{name} cannot be traced: {found.reason}")
        return found.bytes

    ones = dict.fromkeys(whole, 1)
    base = followed(ones)
    if not train:
        # Inference keeps nothing from block to block.
        return base
    steps = {key: followed({**ones, key: 2}) - base for key in whole}
    return base + sum(steps[key] * (whole[key] - 1) for key in whole)


def _fields(name: str) -> dict[str, int]:
    with torch.device("meta"):
        model = build(name)
    return {key: int(getattr(model, key)) for key in COUNTS if hasattr(model, key)}


def _recompute(model: nn.Module) -> None:
    for blocks in BLOCKS:
        for block in getattr(model, blocks, ()):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def inputs_of(
    name: str, clip: tuple[int, int, int], batch: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Creates a model's arguments for a clip of a given size, on meta."""
    with torch.device("meta"):
        model: Any = build(name)

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=kind, device="meta")

    latent, exact = CONFIGURATIONS[name].latent(*clip), torch.float32
    length = model.model_max_length if hasattr(model, "model_max_length") else None
    if length is None:
        length, width = model.y_embedder.y_embedding.shape
        _, height, columns = clip
        inputs = {
            "x": empty(model.in_channels, *latent),
            "timestep": empty(kind=exact),
            "y": empty(1, length, width),
            "num_frames": empty(kind=exact),
            "ar": empty(kind=exact),
            "fps": empty(kind=exact),
            # Plain numbers, from which the scale of positions follows without tensor values.
            "height": [float(height)] * batch,
            "width": [float(columns)] * batch,
        }
        taken = type(model).forward.__annotations__
        return {key: value for key, value in inputs.items() if key in taken}
    count = tokens_of(name, clip)
    places = token_positions(batch, (count, 1, 1), 1, torch.device("meta"))
    inputs = {
        "img": empty(count, model.in_channels),
        "img_ids": places,
        "txt": empty(length, model.context_in_dim),
        "txt_ids": torch.zeros(batch, length, 3, dtype=places.dtype, device="meta"),
        "timesteps": empty(kind=exact),
        "y_vec": empty(model.vec_in_dim),
    }
    if model.cond_in is not None:
        inputs["cond"] = empty(count, model.cond_in.in_features)
    if model.guidance_in is not None:
        inputs["guidance"] = empty(kind=exact)
    return inputs


def tokens_of(name: str, clip: tuple[int, int, int]) -> int:
    configuration = CONFIGURATIONS[name]
    frames, height, width = configuration.latent(*clip)
    patch = configuration.fields.get("patch_size", 2)
    return frames * -(-height // patch) * -(-width // patch)


def _plain(
    found: Mapping[str, Needs], clips: Mapping[str, tuple[int, int, int]], device: str
) -> dict[str, Any]:
    return {
        "device": device,
        "memory_bytes": memory_bytes(device),
        "models": {
            name: {
                "release": CONFIGURATIONS[name].release,
                "class": CONFIGURATIONS[name].kind,
                "clip": clips[name],
                **vars(one),
            }
            for name, one in found.items()
        },
    }


def _show(
    found: Mapping[str, Needs],
    clips: Mapping[str, tuple[int, int, int]],
    config: ModelsConfig,
    device: str,
) -> None:
    room, rows = memory_bytes(device), []

    def shown(nbytes: int) -> str:
        return f"{size_text(nbytes)}{'' if nbytes <= room else ' !'}"

    for name, one in found.items():
        sizes = (shown(n) for n in (one.train, one.train_recomputed, one.sample))
        clip, tokens = "x".join(map(str, clips[name])), f"{one.tokens:,}"
        count = f"{one.parameters / 1e9:.2f} B"
        rows.append((name, CONFIGURATIONS[name].release, count, clip, tokens, *sizes))
    _print_table(
        ("", "release", "parameters", "clip", "tokens", "train", "recomputed", "sample"),
        rows,
        f"{config.dtype}, AdamW, batch {config.batch_size} on one rank; sampling with guidance; "
        f"without text encoder and autoencoder. !: more than the {size_text(room)} of this "
        f"{device}",
    )

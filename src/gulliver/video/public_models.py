"""Public transformers and autoencoders: loading, and how each of them is sampled.

A sampler calls all models in the same way: ``denoiser(x, timestep, **inputs)`` with latents [B, C,
T, H, W] and levels from 0 to 1000. `Denoiser` passes an STDiT the inputs that its forward takes;
`PackedDenoiser` packs latents to MMDiT tokens, and negates its velocity, which points to the noise.
`RELEASES` has the remaining differences.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver import models
from gulliver.checkpoint.files import read_json, read_metadata, read_tensors, write_tensors
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.checkpoint.weights import open_weights
from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.models.autoencoders import Autoencoder
from gulliver.models.clips import pack_latents, token_positions, unpack_latents
from gulliver.models.configurations import CONFIGS, CONFIGURATIONS, make_of_fields
from gulliver.models.identify import autoencoder_fields_of, fields_of, public_name
from gulliver.models.mmdit import MMDiT
from gulliver.video.autoencoders.diffusers import load_diffusers
from gulliver.video.flows import IDDPM, RectifiedFlow
from gulliver.video.text_encoders import (
    ClipTextEncoder,
    TextEncoder,
    TextPair,
    load_text_encoder,
    look_at_encoder,
)

GUIDED = 3
"""Channels with guidance in the public configurations of 1.0 and 1.1."""


Flow = RectifiedFlow | IDDPM


# [Note: given frames in three ways] 1.0 does not support them. 1.1 and 1.2 have them among the
# noisy latents, marked by `x_mask`. 1.3 and 2.0 receive them as additional inputs, with noisy
# latents everywhere; the given frames are copied into the final latents.
@dataclass(frozen=True)
class Release:
    """Published sampling settings of a public model."""

    name: str
    # Creates the diffusion, given the model and the autoencoder's compression.
    flow: Callable[[nn.Module, tuple[int, int, int]], Flow]
    # Published number of sampling steps.
    steps: int
    # Published guidance scale.
    guidance: float
    fps: float
    # How the model receives given frames: not at all, among the latents, or as inputs.
    given: str = "among"
    # Whether texts are padded to full length and attend to the padding.
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


def release_of(model: nn.Module) -> Release:
    names = ("x_embedder_cond", "cond_in")
    beside = any(getattr(model, name, None) is not None for name in names)
    return RELEASES[f"{type(model).__name__}{' with image conditioning' if beside else ''}"]


def patch_of(model: Any) -> tuple[int, int, int]:
    """Returns latent frames, rows and columns per token."""
    size = model.patch_size
    return (1, size, size) if isinstance(size, int) else tuple(size)


def told(bucket: Bucket, fps: float, ones: Tensor) -> dict[str, Tensor]:
    values = {
        "fps": fps,
        "height": bucket.height,
        "width": bucket.width,
        "num_frames": bucket.frames,
        "ar": bucket.height / bucket.width,
    }
    return {name: ones * value for name, value in values.items()}


class Denoiser:
    """Calls an STDiT with the inputs that its forward takes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Inspect the class: plugins and hooks replace the forward of an instance.
        self._takes = frozenset(inspect.signature(type(model).forward).parameters)

    def like(self, device: torch.device) -> Tensor:
        """Returns a scalar of the sampling dtype: float64 for a float64 model, else float32."""
        double = next(self.model.parameters()).dtype == torch.float64
        return torch.ones((), dtype=torch.float64 if double else torch.float32, device=device)

    @property
    def nothing(self) -> Tensor | None:
        """Embedding for no caption, [L, D]; None if the empty caption is encoded instead."""
        return self.model.y_embedder.y_embedding  # type: ignore[union-attr, return-value]

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        """Returns the model's prediction for latents x [B, C, T, H, W] at noise levels [B]."""
        known = {name: value for name, value in inputs.items() if name in self._takes}
        return self.model(x, timestep, **known, **self._condition_inputs(x, inputs))

    def _condition_inputs(self, x: Tensor, inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
        held, latents = inputs.get("held"), inputs.get("latents")
        if held is None or latents is None or not bool(held.any()):
            return {}
        mask = held[:, None, :, None, None].to(x.dtype).expand_as(x)
        # A branch without given frames has the same inputs, except for the frames.
        frames = held.any(dim=0).nonzero().flatten().tolist()
        return {"cond": latents.to(x) * mask, "cond_mask": mask, "mask_index": frames}


class PackedDenoiser(Denoiser):
    """Calls an MMDiT with packed latents, and unpacks its velocity."""

    @property
    def nothing(self) -> Tensor | None:
        return None

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        # ``vector`` is the caption's pooled vector [B, width], and ``strength`` the guidance scale
        # [B] for a distilled model.
        model: Any = self.model
        size, sizes = model.patch_size, x.shape[2:]
        y, vector = inputs["y"], inputs["vector"]
        assert y is not None, "the pipeline encodes captions"
        assert vector is not None, "the pipeline checked the second text encoder"
        text = y.squeeze(1)
        packed: dict[str, Any] = {
            "img": pack_latents(x, size),
            "img_ids": token_positions(len(x), sizes, size, x.device),
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
    return PackedDenoiser(model) if isinstance(model, MMDiT) else Denoiser(model)


# Checks that a transformer, its autoencoder and its text encoders are compatible.
#
# Nothing needs to be loaded: a transformer may be on meta, and only headers are read.


CLIP_LENGTH = 77
"""Token limit of the public models' CLIP; longer texts are truncated, as in training."""


def latent_channels_of(model: Any) -> int:
    return model.in_channels // (model.patch_size**2 if isinstance(model, MMDiT) else 1)


def compressions_of(model: nn.Module) -> set[tuple[int, int, int]]:
    """Returns the compression factors of the autoencoders that fit a model; empty if unknown."""
    # Empty for an unpublished width: any autoencoder may be its own.
    return {
        one.compression
        for one in CONFIGURATIONS.values()
        if one.kind == type(model).__name__
        and one.fields.get("in_channels", CONFIGS[one.kind].in_channels) == model.in_channels
    }


def text_size(outline: Any) -> tuple[int, int]:
    """Returns width and maximum number of a transformer's text token vectors."""
    if isinstance(outline, MMDiT):
        return outline.context_in_dim, outline.model_max_length
    length, width = outline.y_embedder.y_embedding.shape
    return width, length


def text_reader(
    outline: Any, folder: Path | str, clip: Path | str | None, dtype: torch.dtype
) -> Callable[[torch.device], TextEncoder]:
    """Returns a function that loads a transformer's text encoder on a device."""
    width, length = text_size(outline)
    whole, single = release_of(outline).whole, getattr(outline, "vec_in_dim", None)
    look = look_at_encoder(folder)
    if look.channels != width:
        raise GulliverError(
            f"{folder} holds a {look.kind} of width {look.channels}, but this "
            f"{type(outline).__name__} needs width {width}; use its own text encoder"
        )
    if single is None and clip is not None:
        raise GulliverError(f"this {type(outline).__name__} does not use a CLIP; omit {clip}")
    if single is not None:
        _check_clip_folder(clip, single)

    def read(device: torch.device) -> TextEncoder:
        tokens = load_text_encoder(folder, length, device, dtype, whole=whole)
        if clip is None:
            return tokens
        most = min(look_at_encoder(clip).longest or CLIP_LENGTH, CLIP_LENGTH)
        second = load_text_encoder(clip, most, device, dtype, cut=True, whole=whole)
        assert isinstance(second, ClipTextEncoder), "checked"
        return TextPair(tokens, second)

    return read


def _check_clip_folder(clip: Path | str | None, width: int) -> None:
    if clip is None:
        raise GulliverError(
            f"an MMDiT needs a CLIP of width {width} in addition to the T5; pass its folder with "
            "clip= or --clip"
        )
    look = look_at_encoder(clip)
    if look.kind != "CLIP" or look.channels != width:
        raise GulliverError(
            f"{clip} holds a {look.kind} of width {look.channels}, but this MMDiT needs a CLIP of "
            f"width {width}"
        )


def check_latents(outline: Any, autoencoder: Autoencoder) -> None:
    wanted, found = latent_channels_of(outline), autoencoder.latent_channels
    name = f"this {type(outline).__name__} of {release_of(outline).name}"
    if wanted != found:
        raise GulliverError(
            f"the autoencoder's latents have {found} channels, but {name} needs {wanted}; use its "
            "own autoencoder"
        )
    known = compressions_of(outline)
    if known and tuple(autoencoder.compression) not in known:
        told_as = " or ".join("x".join(map(str, one)) for one in sorted(known))
        blocks = "x".join(map(str, autoencoder.compression))
        raise GulliverError(
            f"this autoencoder compresses by {blocks} (frames x rows x columns), but {name} needs "
            f"{told_as}; use the autoencoder that it was trained with"
        )


# Loads a public video model from a Hugging Face folder, a safetensors file, or an index.
#
#     model = load_model("OpenSora-STDiT-v3")
#     model = load_model("Open_Sora_v2.safetensors", torch.device("cuda"), torch.bfloat16)
#
# Model and sizes are inferred from names and shapes of the tensors, the rest is read from a
# ``config.json`` next to them. Names are matched strictly, before any memory is allocated.


NO_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "type")
"""Entries of published configurations that do not affect the model's sizes."""
KINDS = frozenset(one.kind for one in CONFIGURATIONS.values())


def load_model(
    path: Path | str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds the model in a folder or file, and loads its weights.

    Args:
        path: Hugging Face folder, safetensors file or index.
        device: device to load it on; None for the CPU.
        dtype: dtype to convert it to; None for that of the files.
        overrides: arguments of its class, such as ``input_size`` of an STDiT.

    Returns:
        The model, in evaluation mode.

    Raises:
        GulliverError: the files are missing or damaged, belong to another model, or do not match
            their configuration; weights are integers, or float8 without a `dtype`.
    """
    model = outline_model(path, dtype, **overrides)
    model = model.to_empty(device=device or torch.device("cpu"))
    load_huggingface(model, Path(path))
    return model.eval()


def outline_model(
    path: Path | str,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds the model of some files on the meta device, in their dtype, without loading it."""
    # Only headers are read, so that incompatible parts are rejected immediately.
    made, fields, infos = _read(Path(path), overrides)
    with torch.device("meta"):
        model = make_of_fields(made, fields, path)
    _check_positions(Path(path), model, {name: info.shape for name, info in infos.items()})
    return model.to(dtype_of_files(path, model, infos, dtype)).eval()


def dtype_of_files(
    path: Path | str,
    model: nn.Module,
    infos: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> torch.dtype:
    """Returns the dtype to load a model in: the requested one, or that of its files."""
    weights = (name for name, held in model.state_dict().items() if held.is_floating_point())
    for name in weights:
        found = infos[name].dtype if name in infos else torch.float32
        stored = f"{path}: tensor {name!r} is {str(found).removeprefix('torch.')}"
        if not found.is_floating_point:
            raise GulliverError(f"{stored}; expected floating-point weights, not quantized ones")
        if found.itemsize == 1 and dtype is None:
            raise GulliverError(
                f"{stored}, which does not support arithmetic; pass dtype=torch.bfloat16"
            )
    floating = (info.dtype for info in infos.values() if info.dtype.is_floating_point)
    return dtype or next(floating, torch.float32)


def fields_of_files(path: Path | str) -> tuple[str, dict[str, Any]]:
    made, fields, *_ = _read(Path(path), {})
    return made.__name__, fields


def _read(
    path: Path, overrides: Mapping[str, Any]
) -> tuple[type[nn.Module], dict[str, Any], dict[str, Any]]:
    with open_weights(path) as weights:
        infos = dict(weights.infos)
    shapes = {name: info.shape for name, info in infos.items()}
    try:
        found, fields = fields_of(shapes)
    except GulliverError as error:
        raise GulliverError(f"{path}: {error}") from None
    made: type[nn.Module] = getattr(models, found)
    fields |= _configured(path, made) | dict(overrides)
    return made, fields, infos


def _configured(path: Path, kind: type[nn.Module]) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    # A config.json next to a single file may belong to something else.
    if not file.is_file() or (path.is_file() and path.suffix == ".safetensors"):
        return {}
    content = read_json(file)
    said = str(content.get("model_type", ""))
    if said.lower() in {name.lower() for name in KINDS - {kind.__name__}}:
        raise GulliverError(
            f"{file} has model_type {said!r}, but its tensors are those of an {kind.__name__}; "
            "use the files of one model"
        )
    known = {field.name for field in dataclasses.fields(CONFIGS[kind.__name__])}
    return {
        name: value
        for name, value in content.items()
        # Ignore entries that transformers writes for every model.
        if name in known
        or not (name in NO_FIELDS or name.startswith("_") or _of_transformers(name))
    }


def _of_transformers(name: str) -> bool:
    try:
        from transformers import PretrainedConfig
    except ImportError:
        return name == "transformers_version"
    return name == "transformers_version" or name in PretrainedConfig().to_dict()


def _check_positions(path: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an error if position encodings in the files are for a different clip size."""
    for name in ("pos_embed", "pos_embed_temporal"):
        wanted = model.state_dict().get(name)
        if wanted is not None and tuple(wanted.shape) != shapes.get(name):
            counts = [shapes.get(n, (1, 0))[1] for n in ("pos_embed_temporal", "pos_embed")]
            raise GulliverError(
                f"{path} has positions for {counts[0]} frames of {counts[1]} tokens; pass a "
                "matching input_size=(frames, rows, columns) in latents, such as 16, 32, 32"
            )


# Files of autoencoders trained by Gulliver.


KIND = "gulliver video autoencoder"


def save_autoencoder(
    path: Path, autoencoder: VideoAutoencoder, figures: dict[str, Any] | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "kind": KIND,
        "config": json.dumps(autoencoder.config),
        "figures": json.dumps(figures or {}),
    }
    write_tensors(path, autoencoder.state_dict(), metadata)


def load_trained(path: Path) -> VideoAutoencoder:
    metadata = read_metadata(path)
    if metadata.get("kind") != KIND:
        raise GulliverError(f"{path} is not a video autoencoder of Gulliver")
    autoencoder = VideoAutoencoder(**json.loads(metadata["config"]))
    autoencoder.load_state_dict(read_tensors(path))
    return autoencoder.eval()


def autoencoder_figures(path: Path) -> dict[str, Any]:
    return json.loads(read_metadata(path).get("figures", "{}"))


# Loads an autoencoder: one trained by Gulliver, a public one, or a diffusers class.
#
#     autoencoder = load_autoencoder("OpenSora-VAE-v1.2")             # a Hugging Face folder
#     autoencoder = load_autoencoder("vae.safetensors", scaling_factor=0.13025)
#
# Class and sizes are inferred from names and shapes of the tensors, the rest is read from a
# ``config.json`` next to them. Names are matched strictly, before any memory is allocated.


OURS = "AutoencoderKL"
"""Diffusers class that is built as `FrameAutoencoder`."""


def load_autoencoder(
    path: Path | str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Autoencoder:
    """Builds the autoencoder in a folder or file, and loads its weights.

    Args:
        path: Hugging Face folder, safetensors file or index.
        device: device to load it on; None for the CPU.
        dtype: dtype to convert it to; None for that of the files.
        overrides: arguments of its class, such as ``compat`` or ``scaling_factor``.

    Returns:
        The autoencoder, in evaluation mode.

    Raises:
        GulliverError: the files are missing or damaged, or are not an autoencoder; weights are
            integers, or float8 without a `dtype`.
    """
    path = Path(path)
    single = path.suffix == ".safetensors"
    if single and read_metadata(path).get("kind") == KIND:
        return load_trained(path).to(device=device, dtype=dtype)
    config = {} if single else _config(path)
    named = config.get("_class_name", OURS)
    if named != OURS:
        return load_diffusers(path, config).to(device=device, dtype=dtype).eval()
    with open_weights(path) as weights:
        infos = dict(weights.infos)
    try:
        kind, fields = autoencoder_fields_of(
            {public_name(name): _squeezed(name, info.shape) for name, info in infos.items()}
        )
    except GulliverError as error:
        raise GulliverError(f"{path}: {error}") from None
    made = getattr(models, kind)
    known = inspect.signature(made.__init__).parameters
    fields |= {name: value for name, value in config.items() if name in known and value is not None}
    _check_scaling(path, kind, {**fields, **overrides})
    with torch.device("meta"):
        model: nn.Module = make_of_fields(made, fields | overrides, path)
    stored = {public_name(name): info for name, info in infos.items()}
    model = model.to(dtype_of_files(path, model, stored, dtype))
    model = model.to_empty(device=device or torch.device("cpu"))
    _fill(model, path, infos)
    return model.eval()  # pyright: ignore[reportReturnType]


def _config(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_json(file) if file.is_file() else {}


def _check_scaling(path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Raises an error for an image autoencoder without a known latent scaling."""
    # Those with 4 channels use Stable Diffusion's scaling unless a configuration overrides it.
    if kind != "FrameAutoencoder" or "scaling_factor" in fields or fields["latent_channels"] == 4:
        return
    raise GulliverError(
        f"{path} has {fields['latent_channels']} latent channels and no config.json with their "
        "scaling; pass scaling_factor and shift_factor (FLUX has 0.3611 and 0.1159)"
    )


def _squeezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Removes the kernel dims of early files, which stored linear layers as convolutions."""
    return shape[:2] if _is_early(name) and len(shape) == 4 else shape


def _is_early(name: str) -> bool:
    return public_name(name) != name


def _fill(model: nn.Module, path: Path, infos: dict[str, Any]) -> None:
    early = {public_name(name): name for name in infos if _is_early(name)}
    if not early:
        load_huggingface(model, path)
        return
    tensors = {}
    for name, tensor in model.state_dict().items():
        stored = early.get(name, name)
        shape = infos[stored].shape if stored in infos else tuple(tensor.shape)
        # A view of the model's tensor: reading into it fills the model.
        tensors[stored] = tensor.view(shape) if _squeezed(stored, shape) != shape else tensor
    load_huggingface(tensors, path)

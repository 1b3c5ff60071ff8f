"""How each public transformer is sampled: its diffusion, what it is told of a clip, its texts.

A sampler calls every model alike: ``denoiser(x, timestep, **inputs)`` with latents
[B, C, T, H, W] and levels from 0 to 1000. `Denoiser` hands an STDiT what its forward takes;
`PackedDenoiser` packs latents to the tokens of an MMDiT, and turns its velocity, which leads to the
noise, round. `Release` says the rest in a table.
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
        "fps": fps,
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
        # Of the class: plugins and hooks replace the forward of an instance.
        self._takes = frozenset(inspect.signature(type(model).forward).parameters)

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
        return self.model(x, timestep, **known, **self._condition_inputs(x, inputs))

    def _condition_inputs(self, x: Tensor, inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
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
    """Returns the denoiser of a public transformer."""
    return PackedDenoiser(model) if isinstance(model, MMDiT) else Denoiser(model)


# Checks that parts belong together: a transformer, its autoencoder, its text encoders.
#
# Nothing here has to be filled: a transformer may be on meta, folders are looked at.


CLIP_LENGTH = 77
"""Tokens that the CLIP of the public models reads; what is longer is cut, as in their training."""


def latent_channels_of(model: Any) -> int:
    """Returns the channels of the latents that a model is made for."""
    return model.in_channels // (model.patch_size**2 if isinstance(model, MMDiT) else 1)


def compressions_of(model: nn.Module) -> set[tuple[int, int, int]]:
    """Returns the compressions of autoencoders that models of this class and width go with."""
    # Empty for a width that was never published: any autoencoder may be its own.
    return {
        one.compression
        for one in CONFIGURATIONS.values()
        if one.kind == type(model).__name__
        and one.fields.get("in_channels", CONFIGS[one.kind].in_channels) == model.in_channels
    }


def text_size(outline: Any) -> tuple[int, int]:
    """Returns width and greatest number of the token vectors that a transformer reads."""
    if isinstance(outline, MMDiT):
        return outline.context_in_dim, outline.model_max_length
    length, width = outline.y_embedder.y_embedding.shape
    return width, length


def text_reader(
    outline: Any, folder: Path | str, clip: Path | str | None, dtype: torch.dtype
) -> Callable[[torch.device], TextEncoder]:
    """Returns a function that loads the text encoder of a transformer on a device."""
    width, length = text_size(outline)
    whole, single = release_of(outline).whole, getattr(outline, "vec_in_dim", None)
    look = look_at_encoder(folder)
    if look.channels != width:
        raise GulliverError(
            f"{folder} holds a {look.kind} whose vectors are {look.channels} wide, this "
            f"{type(outline).__name__} reads {width}: take the encoder that it was trained with"
        )
    if single is None and clip is not None:
        raise GulliverError(
            f"this {type(outline).__name__} reads no vector of a CLIP: leave {clip} out"
        )
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
            f"an MMDiT reads a CLIP's single vector, {width} wide, besides the T5: name the folder "
            "of a CLIP, with clip= or --clip"
        )
    look = look_at_encoder(clip)
    if look.kind != "CLIP" or look.channels != width:
        raise GulliverError(
            f"{clip} holds a {look.kind} whose vectors are {look.channels} wide: this MMDiT reads "
            f"that of a CLIP, {width} wide"
        )


def check_latents(outline: Any, autoencoder: Autoencoder) -> None:
    """Refuses an autoencoder that a transformer was not trained with."""
    wanted, found = latent_channels_of(outline), autoencoder.latent_channels
    name = f"this {type(outline).__name__} of {release_of(outline).name}"
    if wanted != found:
        raise GulliverError(
            f"the autoencoder's latents have {found} channels, {name} reads {wanted}: take the "
            "autoencoder that it was trained with"
        )
    known = compressions_of(outline)
    if known and tuple(autoencoder.compression) not in known:
        told_as = " or ".join("x".join(map(str, one)) for one in sorted(known))
        blocks = "x".join(map(str, autoencoder.compression))
        raise GulliverError(
            f"a latent of this autoencoder stands for {blocks} pixels, one of {name} for {told_as} "
            "(frames x rows x columns): take the autoencoder that it was trained with"
        )


# Loads a public video model: a Hugging Face folder, a safetensors file, or several with an index.
#
#     model = load_model("OpenSora-STDiT-v3")
#     model = load_model("Open_Sora_v2.safetensors", torch.device("cuda"), torch.bfloat16)
#
# Which model it is and how large follows from names and shapes of the tensors; a ``config.json``
# beside them says the rest. Names are matched strictly, before any memory is filled.


NO_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "type")
"""Entries of public configurations that say nothing of the model's sizes."""
KINDS = frozenset(one.kind for one in CONFIGURATIONS.values())
"""Classes of public models."""


def load_model(
    path: Path | str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds the model that files hold, and fills it.

    Args:
        path: Hugging Face folder, safetensors file or index of several.
        device: device to fill it on; None for the CPU.
        dtype: dtype to convert it to; None for that of the files.
        overrides: arguments of its class, such as ``input_size`` of an STDiT.

    Returns:
        The model, in evaluation mode.

    Raises:
        GulliverError: the files are missing or broken, are those of another model, which is named,
            or do not match their configuration; they hold integers where weights belong, or
            float8 and no dtype is named.
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
    """Builds the model that files hold on meta, in their dtype: `load_model` without the memory."""
    # Only headers are read, so that parts which do not belong together are refused at once.
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
    """Returns the dtype to fill a model in: the one that is asked for, or that of its files."""
    weights = (name for name, held in model.state_dict().items() if held.is_floating_point())
    for name in weights:
        found = infos[name].dtype if name in infos else torch.float32
        stored = f"{path}: tensor {name!r} is {str(found).removeprefix('torch.')}"
        if not found.is_floating_point:
            raise GulliverError(f"{stored}: expected floating-point weights, not quantised ones")
        if found.itemsize == 1 and dtype is None:
            raise GulliverError(f"{stored}, which nothing computes in: pass dtype=torch.bfloat16")
    floating = (info.dtype for info in infos.values() if info.dtype.is_floating_point)
    return dtype or next(floating, torch.float32)


def fields_of_files(path: Path | str) -> tuple[str, dict[str, Any]]:
    """Returns the class of `gulliver.models` that files hold, and its arguments."""
    made, fields, *_ = _read(Path(path), {})
    return made.__name__, fields


def _read(
    path: Path, overrides: Mapping[str, Any]
) -> tuple[type[nn.Module], dict[str, Any], dict[str, Any]]:
    """Reads headers and configuration: class, arguments, tensors by name."""
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
    """Fields of the ``config.json`` beside the weights."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    # Beside a single file may lie that of something else.
    if not file.is_file() or (path.is_file() and path.suffix == ".safetensors"):
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise GulliverError(f"{file} is no configuration: expected an object")
    said = str(content.get("model_type", ""))
    if said.lower() in {name.lower() for name in KINDS - {kind.__name__}}:
        raise GulliverError(
            f"{file} says model_type {said!r}, the tensors beside it are of an {kind.__name__}: "
            "put the files of one model together"
        )
    known = {field.name for field in dataclasses.fields(CONFIGS[kind.__name__])}
    return {
        name: value
        for name, value in content.items()
        # What transformers writes for every model is not the model's.
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
    """Refuses fixed positions of another size of clip, which names alone would not tell."""
    for name in ("pos_embed", "pos_embed_temporal"):
        wanted = model.state_dict().get(name)
        if wanted is not None and tuple(wanted.shape) != shapes.get(name):
            counts = [shapes.get(n, (1, 0))[1] for n in ("pos_embed_temporal", "pos_embed")]
            raise GulliverError(
                f"{path} has positions of {counts[0]} frames of {counts[1]} tokens: pass "
                "input_size=(frames, rows, columns) of such latents, as 16, 32, 32"
            )


# Autoencoders that were trained here, as files.


KIND = "gulliver video autoencoder"


def save_autoencoder(
    path: Path, autoencoder: VideoAutoencoder, figures: dict[str, Any] | None = None
) -> None:
    """Writes weights, statistics and configuration as one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "kind": KIND,
        "config": json.dumps(autoencoder.config),
        "figures": json.dumps(figures or {}),
    }
    write_tensors(path, autoencoder.state_dict(), metadata)


def load_trained(path: Path) -> VideoAutoencoder:
    """Reads what `save_autoencoder` wrote."""
    metadata = read_metadata(path)
    if metadata.get("kind") != KIND:
        raise GulliverError(f"{path} holds no video autoencoder of gulliver")
    autoencoder = VideoAutoencoder(**json.loads(metadata["config"]))
    autoencoder.load_state_dict(read_tensors(path))
    return autoencoder.eval()


def autoencoder_figures(path: Path) -> dict[str, Any]:
    """Reads what was measured when the autoencoder was trained."""
    return json.loads(read_metadata(path).get("figures", "{}"))


# Loads an autoencoder: one trained here, a public one, or a class of diffusers.
#
#     autoencoder = load_autoencoder("OpenSora-VAE-v1.2")             # a Hugging Face folder
#     autoencoder = load_autoencoder("vae.safetensors", scaling_factor=0.13025)
#
# Which one it is and how large follows from names and shapes of the tensors; a ``config.json``
# beside them says the rest. Names are matched strictly, before any memory is filled.


OURS = "AutoencoderKL"
"""Class of diffusers that is built here, as `FrameAutoencoder`."""


def load_autoencoder(
    path: Path | str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Autoencoder:
    """Builds the autoencoder that files hold, and fills it.

    Args:
        path: Hugging Face folder, safetensors file or index of several.
        device: device to fill it on; None for the CPU.
        dtype: dtype to convert it to; None for that of the files.
        overrides: arguments of its class, such as ``compat`` or ``scaling_factor``.

    Returns:
        The autoencoder, in evaluation mode.

    Raises:
        GulliverError: the files are missing or broken, or are of something else, which is named;
            they hold integers where weights belong, or float8 and no dtype is named.
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
        raise GulliverError(f"{path} holds {error}") from None
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
    """The ``config.json`` of a folder, or beside an index."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise GulliverError(f"{file} is no configuration: expected an object")
    return content


def _check_scaling(path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Refuses a picture autoencoder whose latents cannot be normalised."""
    # Those of 4 channels are normalised as Stable Diffusion's unless a configuration says
    # otherwise.
    if kind != "FrameAutoencoder" or "scaling_factor" in fields or fields["latent_channels"] == 4:
        return
    raise GulliverError(
        f"{path} has latents of {fields['latent_channels']} channels and no config.json that says "
        "how they are normalised: pass scaling_factor and shift_factor, FLUX has 0.3611 and 0.1159"
    )


def _squeezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the present shape of a tensor of an early file: linear layers were convolutions."""
    return shape[:2] if _is_early(name) and len(shape) == 4 else shape


def _is_early(name: str) -> bool:
    return public_name(name) != name


def _fill(model: nn.Module, path: Path, infos: dict[str, Any]) -> None:
    """Fills a model, under the names and shapes that the files have."""
    early = {public_name(name): name for name in infos if _is_early(name)}
    if not early:
        load_huggingface(model, path)
        return
    tensors = {}
    for name, tensor in model.state_dict().items():
        stored = early.get(name, name)
        shape = infos[stored].shape if stored in infos else tuple(tensor.shape)
        # A view: what is read into it is the model's.
        tensors[stored] = tensor.view(shape) if _squeezed(stored, shape) != shape else tensor
    load_huggingface(tensors, path)

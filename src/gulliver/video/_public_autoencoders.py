"""Loads an autoencoder: one trained here, a public one, or a class of diffusers.

    autoencoder = load_autoencoder("OpenSora-VAE-v1.2")             # a Hugging Face folder
    autoencoder = load_autoencoder("vae.safetensors", scaling_factor=0.13025)

Which one it is and how large follows from names and shapes of the tensors; a ``config.json`` beside
them says the rest. Names are matched strictly, before any memory is filled.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver import models
from gulliver.checkpoint import load_huggingface, open_weights, read_json, read_metadata
from gulliver.errors import GulliverError
from gulliver.models import Autoencoder, autoencoder_fields_of, make_of_fields, public_name
from gulliver.video._autoencoder_training import KIND, load_trained
from gulliver.video._diffusers_autoencoders import load_diffusers
from gulliver.video._public_models import dtype_of_files

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

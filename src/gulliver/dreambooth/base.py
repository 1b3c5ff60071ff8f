"""The interface between the DreamBooth recipe and a model.

The recipe (`trainer.py`) handles images, prompts, sample weights, ranks and files. A `Base` wraps
the networks: it encodes images, computes the loss and samples. `diffusers_base.py` implements it
for diffusers pipelines, `video_base.py` for Gulliver's video models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json
from gulliver.errors import GulliverError

FACTS = "gulliver.json"
"""File in a result folder that identifies its base model."""
Method = Literal["lora", "full", "token"]
"""What is trained in addition to new tokens: low-rank adapters, all weights, or nothing."""


@dataclass(frozen=True)
class Picture:
    """A training image, upright and without transparency."""

    # File that it was read from.
    path: Path
    # RGB ``[H, W, 3]``, or a prior clip ``[T, H, W, 3]``, uint8.
    pixels: np.ndarray
    # Its own caption; None uses the prompt of the run.
    text: str | None = None


@dataclass(frozen=True)
class TokenHandle:
    """A new token of a text encoder."""

    # The token as written in prompts.
    token: str
    # Ids that replace the token, in order.
    ids: tuple[int, ...]
    # Embeddings of the token, ``[len(ids), width]``: a separate parameter inside `Base.text`, so
    # that no other row can change.
    rows: nn.Parameter


@dataclass(frozen=True)
class TrainedParts:
    """The trained weights of a run.

    Attributes:
        method: what was trained in addition to the tokens.
        tensors: full trained tensors on the CPU, read on access; keyed by their names in the
            networks, prefixed with ``trained.`` or ``text.``.
        tokens: new tokens; their embeddings are among the tensors.
        adapters: PEFT configurations of the adapters, by network: ``trained`` and ``text``.
        write: function that streams tensors to a safetensors file, given a mapping from new to old
            names.
    """

    method: Method
    tensors: Mapping[str, Tensor]
    tokens: tuple[TokenHandle, ...] = ()
    adapters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    write: Callable[[Path, Mapping[str, str]], None] = lambda path, names: None


class Base(Protocol):
    """A model that can learn a subject."""

    # The recipe puts `trained` and `text` into one module whose forward calls `loss`. Adapters are
    # injected in place, so a base calls ``self.trained(...)`` and ``self.text(...)`` as usual and
    # need not know about adapters, ranks or memory limits.

    # Denoiser: a UNet or transformer, trained in full or through adapters.
    trained: nn.Module
    # Text encoder, or a module that holds several; None if there is none to train.
    text: nn.Module | None
    # Names of the layers of `trained` to adapt, as suffixes or full names; those of PEFT's
    # ``target_modules``.
    targets: tuple[str, ...]
    # The same for `text`; empty if it cannot be trained.
    text_targets: tuple[str, ...]

    @property
    def fingerprint(self) -> str: ...

    def add_token(self, token: str, initial: str | None) -> TokenHandle:
        """Adds a token to the tokenizer, and its trainable embedding to the text encoder."""
        ...

    def encode_prompts(self, texts: Sequence[str], train_text: bool) -> None:
        """Prepares all prompts of the run; called before `loss` and `sample`."""
        # If `text` is not trained, a base may encode the prompts now, free it and set it to None.
        ...

    def encode_pictures(self, pictures: Sequence[Picture]) -> Tensor:
        """Encodes images ``[N, ...]``, once for the whole run."""
        # If the autoencoder samples latents, the mean and deviation are encoded instead.
        ...

    def loss(
        self, latents: Tensor, texts: Sequence[str], generators: Sequence[torch.Generator]
    ) -> Tensor:
        """Computes the loss ``[N]`` of each sample at a random timestep, in at least float32."""
        ...

    def sample(self, texts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        """Generates an image ``[H, W, 3]`` or a clip ``[T, H, W, 3]`` per prompt, uint8."""
        ...

    def read_adapter(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Mapping[str, object]]]:
        """Reads adapters written by `save`."""
        ...

    def save(self, folder: Path, learnt: TrainedParts) -> None:
        """Writes the trained weights in the usual format of the model; called on rank 0."""
        ...


def check_adapter(path: Path, fingerprint: str) -> None:
    file = (path if path.is_dir() else path.parent) / FACTS
    if file.is_file() and (known := read_json(file).get("base")) != fingerprint:
        raise GulliverError(
            f"--adapter {path} was trained on another base model, {known}; --model is {fingerprint}"
        )

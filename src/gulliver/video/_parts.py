"""Networks that lie in their files until they are needed, one at a time.

    room = Room(device)
    model = room.part("transformer", lambda device: load_model(path, device))
    model()        # fills it; what was filled before is freed

A pipeline has three networks and never needs two at once: the text encoder reads all captions and
goes, the transformer samples and goes, the autoencoder decodes. With `keep` all stay once filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.hardware import memory_bytes
from gulliver.memory import activation_peak
from gulliver.parallel.convolution import stream_decode
from gulliver.video._text_encoders import EncodedText, TextEncoder, padded

T = TypeVar("T")
CALM = 0.8
"""Share of the free memory that a prediction may take."""


class Room:
    """The device that networks share, of which one at a time is filled."""

    def __init__(self, device: torch.device, keep: bool = False) -> None:
        self.device, self.keep = device, keep
        self._parts: list[PipelinePart[Any]] = []

    def part(self, load: Callable[[torch.device], T]) -> PipelinePart[T]:
        """Adds a network, by the function that fills it on a device."""
        made = PipelinePart(self, load)
        self._parts.append(made)
        return made

    def make_way(self, part: PipelinePart[Any]) -> None:
        """Frees all networks but one."""
        if self.keep:
            return
        for other in self._parts:
            if other is not part:
                other.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class PipelinePart(Generic[T]):
    """A network of a `Room`; call it to have it filled."""

    def __init__(self, room: Room, load: Callable[[torch.device], T]) -> None:
        self._room, self._load = room, load
        self._filled: T | None = None
        self.after: Callable[[T], object] | None = None
        """Function that is called with the network whenever it was filled."""

    def __call__(self) -> T:
        """Returns the network, filled."""
        if self._filled is None:
            self._room.make_way(self)
            self._filled = self._load(self._room.device)
            if self.after is not None:
                self.after(self._filled)
        return self._filled

    def free(self) -> None:
        """Forgets the network; its memory goes when nobody else holds it."""
        self._filled = None


class PartEncoder:
    """A text encoder of a room, which says each caption once."""

    def __init__(self, part: PipelinePart[TextEncoder], channels: int, max_length: int) -> None:
        self._part = part
        self.channels, self.max_length = channels, max_length
        self._said: dict[str, dict[str, Tensor]] = {}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder, which is filled for it."""
        return self._part().fingerprint

    def encode(self, captions: list[str]) -> EncodedText:
        """Encodes captions, as `TextEncoder.encode`; those that it has said need no encoder."""
        for caption in dict.fromkeys(captions):
            if caption not in self._said:
                # One by one: what a caption says must not depend on what it is padded to.
                self._said[caption] = said_of(self._part().encode([caption]))
        return padded([self._said[caption] for caption in captions])


class PartAutoencoder:
    """An autoencoder of a room: its sizes are known at once, it is filled to encode and decode."""

    def __init__(self, part: PipelinePart[Any], outline: Any, memory: int | None = None) -> None:
        if memory is not None and not memory >= 1:
            raise GulliverError(
                f"memory is {memory}: expected bytes for decoding a clip, 1 at least, or None"
            )
        self.part, self._outline, self._memory = part, outline, memory
        self._peaks: dict[tuple[int, ...], int] = {}
        self.compression, self.latent_channels = outline.compression, outline.latent_channels
        self.latent_shape = outline.latent_shape

    def encode(self, video: Tensor) -> Tensor:
        """Encodes clips [B, 3, T, H, W] to normalised latents."""
        autoencoder = self.part()
        return autoencoder.encode(video.to(next(autoencoder.parameters()).dtype))

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes latents [B, C, T, H, W] clip by clip, in stretches where memory asks for them."""
        autoencoder = self.part()
        clips = [self._decoded(autoencoder, one, num_frames) for one in latents.split(1)]
        return torch.cat(clips).float()

    def _decoded(self, autoencoder: Any, latents: Tensor, num_frames: int | None) -> Tensor:
        room = free_memory(latents.device) if self._memory is None else self._memory
        # Samplers are exact in their own dtype, autoencoders in theirs.
        latents = latents.to(next(autoencoder.parameters()).dtype)
        # Networks that ranks share are cut already.
        need = self._peak(autoencoder, latents) if self.part.after is None else 0
        if need <= room:
            return autoencoder.decode(latents, num_frames)
        length = max(1, int(latents.shape[2] * room / need))
        stretches = stream_decode(autoencoder, latents.split(length, dim=2))
        # Pieces of the finished clip wait in host memory.
        return torch.cat([stretch.cpu() for stretch in stretches], dim=2)

    def _peak(self, autoencoder: Any, latents: Tensor) -> int:
        """Predicts the bytes that decoding takes; 0 where it cannot be followed."""
        shape = tuple(latents.shape)
        if shape not in self._peaks:
            found = activation_peak(_Decoding(autoencoder), (latents,))
            self._peaks[shape] = found.bytes or 0
        return self._peaks[shape]


class _Decoding(nn.Module):
    """Decodes when it is called."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder: Any = autoencoder.requires_grad_(False)
        self.eval()

    def forward(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)


def free_memory(device: torch.device) -> int:
    """Returns the bytes of a device that a prediction may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CALM)
    return int(memory_bytes("cpu") * CALM / 2)


def said_of(text: EncodedText) -> dict[str, Tensor]:
    """Returns what an encoder said of one caption, as it is kept."""
    said = {"embeddings": text.embeddings[0, 0], "mask": text.mask[0]}
    return said if text.vector is None else {**said, "vector": text.vector[0]}

"""Encodes sentences without a download: a frozen random vector for each word."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.video._text_encoders import EncodedText

PUNCTUATION = ".,;:!?\"'()"


def words_of(prompt: str) -> list[str]:
    """Lower-case words without punctuation at their ends."""
    words = [word.strip(PUNCTUATION) for word in prompt.lower().split()]
    words = [word for word in words if word]
    if not words:
        raise GulliverError(
            "the prompt is empty: write a sentence such as 'the digit 3 moving left'"
        )
    return words


def unknown_words(prompt: str, vocabulary: Iterable[str]) -> list[str]:
    """The words of a prompt that are not in the vocabulary."""
    known = frozenset(vocabulary)
    return [word for word in words_of(prompt) if word not in known]


class WordEncoder:
    """Each word is a Gaussian vector drawn from a hash of its letters, plus a code of its position.

    Stands where a large text encoder would: frozen, the same in every process, no weights to load.

    Args:
        channels: width of the vectors.
        max_length: words of the longest sentence.
    """

    def __init__(self, channels: int = 64, max_length: int = 8) -> None:
        if channels < 2 or channels % 2 or max_length < 1:
            raise GulliverError(
                f"word vectors need an even width and a length, not {channels}, {max_length}"
            )
        self.channels, self.max_length = channels, max_length
        self._vectors: dict[str, Tensor] = {}
        self._taught: dict[str, Tensor] = {}
        steps = torch.arange(channels // 2) / (channels // 2)
        angles = torch.arange(max_length)[:, None] * 10_000.0**-steps
        self._places = torch.cat([angles.sin(), angles.cos()], dim=-1)

    @property
    def fingerprint(self) -> str:
        """Text that changes with whatever changes what it says."""
        told = f"words {self.channels} {self.max_length}"
        for word, vector in sorted(self._taught.items()):
            values = vector.detach().double().cpu().numpy().tobytes()
            told += f" {word} {hashlib.blake2b(values, digest_size=8).hexdigest()}"
        return told

    def teach(self, word: str, vector: Tensor) -> None:
        """Gives a word a vector ``[channels]`` that was learnt, or that learns."""
        # Sentences are then encoded in the vector's dtype and on its device.
        self._taught[word] = vector

    def encode(self, captions: list[str]) -> EncodedText:
        """Encodes sentences."""
        sentences = [words_of(prompt) for prompt in captions]
        for prompt, words in zip(captions, sentences, strict=True):
            if len(words) > self.max_length:
                raise GulliverError(
                    f"{len(words)} words are more than this model reads ({self.max_length}): "
                    f"shorten {prompt[:60]!r}"
                )
        longest = max(map(len, sentences))
        like = next(iter(self._taught.values()), self._places)
        vectors = like.new_zeros(len(captions), 1, longest, self.channels)
        mask = torch.zeros(len(captions), longest, dtype=torch.bool)
        for row, words in enumerate(sentences):
            stacked = torch.stack([self.vector(word).to(like) for word in words])
            vectors[row, 0, : len(words)] = stacked + self._places[: len(words)].to(like)
            mask[row, : len(words)] = True
        return EncodedText(vectors, mask)

    def vector(self, word: str) -> Tensor:
        """The vector of a word ``[channels]``, without the code of its place."""
        if word in self._taught:
            return self._taught[word]
        if word not in self._vectors:
            seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "little")
            generator = torch.Generator().manual_seed(seed)
            self._vectors[word] = torch.randn(self.channels, generator=generator)
        return self._vectors[word]

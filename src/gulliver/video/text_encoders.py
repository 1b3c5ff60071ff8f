"""Text encoders with a common interface: T5, CLIP, both together, and word vectors.

    encoder = load_text_encoder("t5-v1_1-xxl", max_length=300)
    embeddings, mask, vector = encoder.encode(["a cat on a roof"])

T5 returns a vector per token, CLIP a single one for the whole caption; a `TextPair` returns both.
Encoders are frozen. `CachedTextEncoder` caches embeddings on disk, by a fingerprint of the encoder
and the caption, so each caption is encoded once.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from gulliver.checkpoint.files import read_json, read_tensors, write_tensors
from gulliver.errors import GulliverError


class EncodedText(tuple[Tensor, ...]):
    """Encoded captions: embeddings and mask, or also a pooled vector.

    Args:
        embeddings: token vectors [B, 1, L, channels], zero beyond a caption's end.
        mask: True for valid tokens [B, L].
        vector: pooled vector of each caption [B, width]; None for encoders without one.
    """

    def __new__(cls, embeddings: Tensor, mask: Tensor, vector: Tensor | None = None) -> Self:
        both = (embeddings, mask)
        return super().__new__(cls, both if vector is None else (*both, vector))

    @property
    def embeddings(self) -> Tensor:
        return self[0]

    @property
    def mask(self) -> Tensor:
        return self[1]

    @property
    def vector(self) -> Tensor | None:
        return self[2] if len(self) == 3 else None


class TextEncoder(Protocol):
    """Encoder of captions."""

    @property
    def channels(self) -> int:
        """Width of a token's vector."""
        ...

    @property
    def max_length(self) -> int:
        """Maximum caption length, in its own tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever the encodings change."""
        ...

    def encode(self, captions: list[str]) -> EncodedText:
        """Encodes captions.

        Raises:
            GulliverError: there is nothing to encode, or a caption is too long.
        """
        ...


class _FromFolder:
    """A text encoder of transformers in a local folder; arguments as for `load_text_encoder`."""

    name, kind = "", ""
    """Display name and transformers class."""

    def __init__(
        self,
        folder: Path | str,
        max_length: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        cut: bool = False,
        whole: bool = False,
    ) -> None:
        self.folder, self.max_length = Path(folder), max_length
        self.cut, self.whole = cut, whole
        self.device = device or torch.device("cpu")
        check_length(look_at_encoder(self.folder), max_length)
        try:
            import transformers
        except ImportError:
            raise GulliverError(
                "text encoders need transformers; install it with pip install transformers"
            ) from None
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True
            )
            self.model = getattr(transformers, self.kind).from_pretrained(
                self.folder, local_files_only=True, dtype=dtype or torch.float32
            )
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().split("\n")[0]
            raise GulliverError(f"{self.folder} cannot be loaded as {self.name}: {line}") from None
        self.model.to(self.device).eval().requires_grad_(False)

    @property
    def channels(self) -> int:
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> EncodedText:
        tokens = self._tokens(captions)
        mask = tokens["attention_mask"].bool()
        out = self.model(**tokens)
        states = out.last_hidden_state.masked_fill(~mask[..., None], 0)
        return EncodedText(states[:, None], mask, getattr(out, "pooler_output", None))

    @property
    def fingerprint(self) -> str:
        """Kind, configuration, length and a digest of the encoder's weights."""
        total = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self.model.state_dict().items()):
            # A few elements of each tensor are fast to read and distinguish weights.
            part = value.reshape(-1)[:: max(1, value.numel() // 64)].double().cpu()
            total.update(name.encode() + part.numpy().tobytes())
        config = json.dumps(read_json(self.folder / "config.json"), sort_keys=True)
        total.update(config.encode())
        how = f"{self.max_length} {self.cut} {self.whole} {self._dtype}"
        return f"{self.name} {total.hexdigest()} {how}"

    @property
    def _dtype(self) -> str:
        return str(next(self.model.parameters()).dtype)

    def _tokens(self, captions: list[str]) -> dict[str, Tensor]:
        found = self.tokenizer(
            captions,
            padding="max_length" if self.whole else "longest",
            truncation=self.cut,
            max_length=self.max_length,
            return_tensors="pt",
        )
        counts = found["attention_mask"].sum(1)
        if int(counts.max()) > self.max_length:
            at = int(counts.argmax())
            raise GulliverError(
                f"{int(counts[at])} tokens exceed this model's limit of {self.max_length}; "
                f"shorten {captions[at][:60]!r}, or pass cut=True"
            )
        mask = torch.ones_like(found["attention_mask"]) if self.whole else found["attention_mask"]
        ids = found["input_ids"].to(self.device)
        return {"input_ids": ids, "attention_mask": mask.to(self.device)}


class T5TextEncoder(_FromFolder):
    """The encoder of a T5: a vector per token."""

    name, kind = "T5", "T5EncoderModel"


class ClipTextEncoder(_FromFolder):
    """The text encoder of a CLIP: a pooled vector of the caption, and one vector per token."""

    name, kind = "CLIP", "CLIPTextModel"


class TextPair:
    """Token vectors of one encoder and the pooled vector of another, as in Open-Sora 2.0.

    Args:
        tokens: encoder of the tokens.
        whole: encoder of the pooled vector; it truncates long captions.

    Raises:
        GulliverError: the second encoder has no pooled vector.
    """

    def __init__(self, tokens: TextEncoder, whole: ClipTextEncoder) -> None:
        self.tokens, self.whole = tokens, whole
        self.channels, self.max_length = tokens.channels, tokens.max_length

    @property
    def fingerprint(self) -> str:
        return f"{self.tokens.fingerprint} + {self.whole.fingerprint}"

    def encode(self, captions: list[str]) -> EncodedText:
        embeddings, mask = self.tokens.encode(captions)[:2]
        return EncodedText(embeddings, mask, self.whole.encode(captions).vector)


class CachedTextEncoder:
    """A text encoder with a disk cache: one file per caption, by fingerprint.

    The encoder runs for captions without a file. Files are written atomically, so several processes
    may share a folder.

    Args:
        encoder: encoder for missing captions.
        folder: folder of the files.
    """

    encoder: TextEncoder | None
    """Encoder for missing captions; None if all are stored and the encoder is gone."""

    def __init__(self, encoder: TextEncoder, folder: Path | str) -> None:
        self.encoder, self.folder = encoder, Path(folder)
        self.channels, self.max_length = encoder.channels, encoder.max_length
        self.fingerprint = encoder.fingerprint

    @classmethod
    def of_folder(
        cls, folder: Path | str, fingerprint: str, channels: int, max_length: int
    ) -> Self:
        """Opens a cache folder without an encoder."""
        kept = cls.__new__(cls)
        kept.encoder, kept.folder, kept.fingerprint = None, Path(folder), fingerprint
        kept.channels, kept.max_length = channels, max_length
        return kept

    def encode(self, captions: list[str]) -> EncodedText:
        """Encodes captions like `TextEncoder.encode`; embeddings on disk are reused."""
        files = {caption: self._file(caption) for caption in captions}
        for caption in self.missing(captions):
            if self.encoder is None:
                raise GulliverError(f"{self.folder} has no embedding of {caption[:60]!r}")
            # One at a time: an encoding must not depend on its padding.
            said = encoding_of(self.encoder.encode([caption]))
            write_tensors(files[caption], {**said, "mask": said["mask"].to(torch.uint8)})
        return padded([_read_kept(files[caption]) for caption in captions])

    def missing(self, captions: list[str]) -> list[str]:
        """Lists distinct captions without a file."""
        return [one for one in dict.fromkeys(captions) if not self._file(one).is_file()]

    def _file(self, caption: str) -> Path:
        text = json.dumps([self.fingerprint, caption]).encode()
        return self.folder / f"{hashlib.blake2b(text, digest_size=20).hexdigest()}.safetensors"


def _read_kept(file: Path) -> dict[str, Tensor]:
    try:
        said = read_tensors(file)
    except GulliverError as error:
        raise GulliverError(f"{error}; delete this file to encode the caption again") from None
    return said


def encoding_of(text: EncodedText) -> dict[str, Tensor]:
    """Returns the encoding of one caption in the format of the cache."""
    said = {"embeddings": text.embeddings[0, 0], "mask": text.mask[0]}
    return said if text.vector is None else {**said, "vector": text.vector[0]}


def padded(texts: list[dict[str, Tensor]]) -> EncodedText:
    """Returns stored captions as one batch, padded with zeros to the longest."""
    longest = max(len(text["mask"]) for text in texts)
    first = texts[0]["embeddings"]
    embeddings = first.new_zeros(len(texts), 1, longest, first.shape[1])
    mask = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        embeddings[row, 0, : len(text["mask"])] = text["embeddings"]
        mask[row, : len(text["mask"])] = text["mask"].bool()
    vectors = [text["vector"] for text in texts if "vector" in text]
    return EncodedText(embeddings, mask, torch.stack(vectors) if vectors else None)


def check_encoder(encoder: TextEncoder, width: int, length: int) -> None:
    """Raises an error for a text encoder that does not match a model."""
    if encoder.channels != width:
        raise GulliverError(
            f"the text encoder has width {encoder.channels}, but the model needs {width}; use "
            "the encoder that it was trained with"
        )
    if encoder.max_length > length:
        raise GulliverError(
            f"the text encoder returns up to {encoder.max_length} tokens, but the model accepts "
            f"{length}; pass max_length={length}"
        )


class EncoderLook(NamedTuple):
    """Kind and sizes of a text encoder, from its folder."""

    kind: str
    channels: int
    # Maximum tokens of a caption; None for no limit.
    longest: int | None


def look_at_encoder(folder: Path | str) -> EncoderLook:
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise GulliverError(f"{folder} is not a text encoder: it has no config.json")
    content = read_json(file)
    kind = content.get("model_type", "") if isinstance(content, dict) else ""
    if kind in ("t5", "mt5", "umt5"):
        return EncoderLook("T5", int(content.get("d_model", 512)), None)
    if kind in ("clip", "clip_text_model"):
        text = content.get("text_config", content)
        longest = int(text.get("max_position_embeddings", 77))
        return EncoderLook("CLIP", int(text.get("hidden_size", 512)), longest)
    raise GulliverError(f"{folder} holds a {kind or 'nameless'} model; expected a T5 or a CLIP")


def check_length(look: EncoderLook, max_length: int) -> None:
    longest = look.longest
    if longest is not None and max_length > longest:
        raise GulliverError(
            f"max_length={max_length} exceeds this {look.kind}'s limit of {longest} tokens"
        )


def load_text_encoder(
    folder: Path | str,
    max_length: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    cut: bool = False,
    whole: bool = False,
) -> T5TextEncoder | ClipTextEncoder:
    """Loads the text encoder of a folder, according to its configuration.

    Args:
        folder: Hugging Face folder with the model and its tokenizer.
        max_length: maximum caption length in tokens; None for 512 of a T5, or the limit of a CLIP.
        device: device of the encoder; None for the CPU.
        dtype: dtype of the weights; None for float32.
        cut: whether to truncate long captions instead of raising an error.
        whole: whether to pad every caption to `max_length` and attend to the padding, as Open-Sora
            2.0 and FLUX.1 were trained.

    Raises:
        GulliverError: the folder does not exist, is neither a T5 nor a CLIP, does not support that
            length, or transformers is missing.
    """
    look = look_at_encoder(folder)
    length = (look.longest or 512) if max_length is None else max_length
    kind = T5TextEncoder if look.kind == "T5" else ClipTextEncoder
    return kind(folder, length, device, dtype, cut, whole)


# Encodes sentences without a download: a frozen random vector per word.


PUNCTUATION = ".,;:!?\"'()"


def words_of(prompt: str) -> list[str]:
    """Splits a prompt into lower-case words without leading and trailing punctuation."""
    words = [word.strip(PUNCTUATION) for word in prompt.lower().split()]
    words = [word for word in words if word]
    if not words:
        raise GulliverError(
            "the prompt is empty; write a sentence such as 'the digit 3 moving left'"
        )
    return words


class WordEncoder:
    """Encodes each word as a Gaussian vector seeded by its hash, plus a position encoding.

    A stand-in for a large text encoder: frozen, the same in every process, no weights to load.
    """

    def __init__(self, channels: int = 64, max_length: int = 8) -> None:
        self.channels, self.max_length = channels, max_length
        self._vectors: dict[str, Tensor] = {}
        self._taught: dict[str, Tensor] = {}
        steps = torch.arange(channels // 2) / (channels // 2)
        angles = torch.arange(max_length)[:, None] * 10_000.0**-steps
        self._places = torch.cat([angles.sin(), angles.cos()], dim=-1)

    @property
    def fingerprint(self) -> str:
        told = f"words {self.channels} {self.max_length}"
        for word, vector in sorted(self._taught.items()):
            values = vector.detach().double().cpu().numpy().tobytes()
            told += f" {word} {hashlib.blake2b(values, digest_size=8).hexdigest()}"
        return told

    def teach(self, word: str, vector: Tensor) -> None:
        # Sentences are then encoded in the vector's dtype and on its device.
        self._taught[word] = vector

    def encode(self, captions: list[str]) -> EncodedText:
        sentences = [words_of(prompt) for prompt in captions]
        for prompt, words in zip(captions, sentences, strict=True):
            if len(words) > self.max_length:
                raise GulliverError(
                    f"{len(words)} words exceed this model's limit of {self.max_length}; shorten "
                    f"{prompt[:60]!r}"
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
        """Returns the vector of a word ``[channels]``, without its position encoding."""
        if word in self._taught:
            return self._taught[word]
        if word not in self._vectors:
            seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "little")
            generator = torch.Generator().manual_seed(seed)
            self._vectors[word] = torch.randn(self.channels, generator=generator)
        return self._vectors[word]

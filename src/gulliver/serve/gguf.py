"""`GgufFile`: serves models in llama.cpp's file format like transformers folders.

Configuration, tokenizer and chat template come from the metadata; tensors get the names and the
layout of transformers' parameters. Quantized blocks are dequantized to float32 when read, with the
same values as in llama.cpp; float16 and bfloat16 are widened. From then on the model runs like any
other.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gulliver.checkpoint.huggingface import ModelWeights
from gulliver.checkpoint.weights import TensorInfo, Weights
from gulliver.errors import GulliverError, nearest
from gulliver.memory.parts import Part
from gulliver.serve.tokenizer import FileTokenizer, is_plain

SUFFIX = ".gguf"


def is_gguf(path: Path | str) -> bool:
    return Path(path).suffix.lower() == SUFFIX


# Blocks [N, bytes] of quantized weights to float32 [N, weights]. A block is a scale in float16, for
# some formats a minimum, and integers of a few bits. The K formats have blocks of 256 weights, with
# scales of 6 bits for each 32 (8 bits for each 16 in Q6_K).


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].view(torch.float16).float()


def _fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Unpacks fields of `bits` bits, low bits first, from groups of `width` bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    fields = packed.reshape(len(packed), -1, 1, width) >> shifts
    return (fields & (1 << bits) - 1).reshape(len(packed), -1)


def _fifth(packed: Tensor) -> Tensor:
    """Unpacks the fifth bit of 32 weights, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed[..., None] >> shifts & 1).flatten(1) << 4


def _q4_0(b: Tensor) -> Tensor:
    return (_fields(b[:, 2:], 4, 16).float() - 8) * _half(b, 0)


def _q4_1(b: Tensor) -> Tensor:
    return _fields(b[:, 4:], 4, 16).float() * _half(b, 0) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return ((_fields(b[:, 6:], 4, 16) | _fifth(b[:, 2:6])).float() - 16) * _half(b, 0)


def _q5_1(b: Tensor) -> Tensor:
    fields = _fields(b[:, 8:], 4, 16) | _fifth(b[:, 4:8])
    return fields.float() * _half(b, 0) + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float() * _half(b, 0)


def _with_scales(b: Tensor, fields: Tensor) -> Tensor:
    """Applies the scales and minima of a Q4_K or Q5_K block, packed in bytes 4 to 16."""
    first, second, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([first & 63, (high & 15) | (first >> 6 << 4)], 1)
    minima = torch.cat([second & 63, (high >> 4) | (second >> 6 << 4)], 1)
    scales, minima = (_half(b, 0) * scales)[..., None], (_half(b, 2) * minima)[..., None]
    return (fields.view(-1, 8, 32).float() * scales - minima).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _with_scales(b, _fields(b[:, 16:], 4, 32))


def _q5_k(b: Tensor) -> Tensor:
    return _with_scales(b, _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4)


def _q6_k(b: Tensor) -> Tensor:
    fields = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    scales = _half(b, 208) * b[:, 192:208].view(torch.int8)
    return ((fields.view(-1, 16, 16).float() - 32) * scales[..., None]).flatten(1)


class BlockFormat(NamedTuple):
    """A tensor format: block size, bytes per block, and the function that decodes blocks."""

    name: str
    # Number of weights in a block, and bytes of a block.
    weights: int
    bytes: int
    dequantize: Callable[[Tensor], Tensor]


FORMATS = {
    0: BlockFormat("F32", 1, 4, lambda b: b.view(torch.float32)),
    1: BlockFormat("F16", 1, 2, lambda b: b.view(torch.float16).float()),
    30: BlockFormat("BF16", 1, 2, lambda b: b.view(torch.bfloat16).float()),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
}
"""Tensor formats by their number in the file."""


# `GgufFile`: metadata and tensors. The gguf package's reader is not used: it takes seconds for the
# metadata of a vocabulary, which it keeps as arrays of single texts.

_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Stored(NamedTuple):
    """Position and format of a tensor in a file."""

    format: BlockFormat
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """Metadata of a GGUF file, and its tensors by llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        try:
            with path.open("rb") as file:
                # Copy on write, because torch does not accept read-only memory.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise GulliverError(f"{path} cannot be read: {error}") from None
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError) as error:
            raise GulliverError(
                f"{path} is damaged or not a GGUF file ({type(error).__name__}: {error})"
            ) from None

    def _read_header(self) -> None:
        magic, version, tensors, entries = self._unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise GulliverError(f"{self.path} is not a GGUF file of version 2 or 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(*self._unpack("<I"))
        if self.metadata.get("split.count", 1) > 1:
            raise GulliverError(
                f"{self.path} is one of several files of a model: join them "
                "(llama-gguf-split --merge)"
            )
        found = {}
        for _ in range(tensors):
            name = self._string()
            dims = self._unpack(f"<{self._unpack('<I')[0]}Q")
            kind, offset = self._unpack("<IQ")
            if kind not in FORMATS:
                known = ", ".join(one.name for one in FORMATS.values())
                raise GulliverError(
                    f"{self.path}: {name} is of format {kind}, which is not supported: download "
                    f"the model in one of {known}"
                )
            found[name] = Stored(FORMATS[kind], tuple(reversed(dims)), offset)
        alignment = self.metadata.get("general.alignment", 32)
        begin = -(-self._at // alignment) * alignment
        self.tensors = {n: one._replace(offset=one.offset + begin) for n, one in found.items()}
        for name, one in self.tensors.items():
            if one.offset + self._bytes(one) > len(self._map):
                raise GulliverError(f"{self.path} ends before {name} does: download it again")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        start = self._at + 8
        # A vocabulary has hundreds of thousands: `_unpack` would take twice as long.
        self._at = start + int.from_bytes(self._map[start - 8 : start], "little")
        if self._at > len(self._map):
            raise struct.error("a string extends past the end of the file")
        return self._map[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(f"<{_PLAIN[kind]}")[0]
        kind, count = self._unpack("<IQ")
        if kind in _PLAIN:
            return list(self._unpack(f"<{count}{_PLAIN[kind]}"))
        return [self._value(kind) for _ in range(count)]

    def _bytes(self, one: Stored) -> int:
        return math.prod(one.shape) // one.format.weights * one.format.bytes

    def _blocks(self, one: Stored) -> Tensor:
        raw = np.frombuffer(self._map, np.uint8, self._bytes(one), one.offset)
        return torch.from_numpy(raw).view(-1, one.format.bytes)

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor as float32."""
        one = self.tensors[name]
        return one.format.dequantize(self._blocks(one)).view(one.shape)

    def int4(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Reads a 4-bit tensor in the format of `to_int4`; None for other formats."""
        one = self.tensors[name]
        if one.format.name not in ("Q4_0", "Q4_1") or len(one.shape) != 2:
            return None
        blocks, rows = self._blocks(one), one.shape[0]
        at = one.format.bytes - 16
        pairs = blocks[:, :at].contiguous().view(torch.float16)
        if at == 2:  # Q4_0: values from -8 on
            pairs = torch.cat([pairs, -8 * pairs], 1)
        return blocks[:, at:].reshape(rows, -1).view(torch.int8), pairs.view(rows, -1, 2)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value of the architecture, such as ``block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @cached_property
    def names(self) -> dict[str, str]:
        """Maps parameter names of transformers to names in the file."""
        gemma = self.architecture.startswith("gemma3")
        parts = _PARTS | (_GEMMA if gemma else {})
        found = {}
        for name in self.tensors:
            front, _, kind = name.rpartition(".")
            block, _, part = front.rpartition(".")
            if name == "rope_freqs.weight":
                found[ROTARY] = name
            elif part in parts and kind in ("weight", "bias"):
                layer = block.replace("blk.", "model.layers.")
                found[f"{layer}.{parts[part]}.{kind}".removeprefix(".")] = name
            else:
                raise GulliverError(f"{self.path}: {name} is not a tensor of a supported model")
        return found


# What transformers needs to build the model: its type, configuration and names of parameters.

ROTARY = "model.rotary_emb.inv_freq"
"""Buffer of a model's rotary frequencies, which some files scale individually."""
_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma3": "gemma3_text",
}
"""Supported architectures with transformers' names."""


def build_config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """Returns a file's metadata under the names of transformers' ``config.json``."""
    file = open_file(path)
    if file.architecture not in TYPES:
        raise GulliverError(
            f"{file.path}: models of type {file.architecture!r} are not served from GGUF files: "
            f"{nearest(file.architecture, TYPES)}"
        )
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        raise GulliverError(f"{file.path}: mixtures of experts are not served from GGUF files")
    heads, hidden = file.get("attention.head_count"), file.get("embedding_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 1e4)}
    scaling = file.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise GulliverError(f"{file.path}: rotary scaling of type {scaling!r} is not supported")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor", 1.0)}
    values = {
        "model_type": TYPES[file.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": file.get("context_length"),
        "hidden_size": hidden,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length", hidden // heads),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
    }
    if not file.architecture.startswith("gemma"):
        values["hidden_act"] = "silu"
    if file.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 1e4)}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        values["sliding_window"] = file.get("attention.sliding_window")
        # Only the largest model scales its queries by a size other than the head dim.
        largest = file.get("block_count") == 62
        values["query_pre_attn_scalar"] = hidden // heads if largest else values["head_dim"]
    return values


def check_names(path: Path, model: Any) -> None:
    """Rejects a file with tensors that the configured model lacks."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | {ROTARY}
    if more := sorted(set(open_file(path).names) - known):
        raise GulliverError(f"{path}: {more[0]} is not a parameter of a {type(model).__name__}")


@cache
def _opened(path: Path, changed: int) -> GgufFile:
    del changed
    return GgufFile(path)


def open_file(path: Path) -> GgufFile:
    """Opens a file; its metadata is read only once."""
    try:
        return _opened(path.resolve(), path.stat().st_mtime_ns)
    except OSError as error:
        raise GulliverError(f"{path} cannot be read: {error}") from None


class GgufWeights(ModelWeights):
    """Tensors of a GGUF file, with the names and layouts of transformers' parameters."""

    def __init__(self, path: Path) -> None:
        file = open_file(path)
        infos = {
            name: TensorInfo(torch.float32, file.tensors[kept].shape)
            for name, kept in file.names.items()
        }
        computed = {}
        for name, info in infos.items():
            computed[name] = [(0, info.numel, name, lambda name=name: {name: self.value(name)})]
        super().__init__(_NoWeights(path), {}, computed, infos, {})
        self._file = file

    def value(self, name: str) -> Tensor:
        file, kept = self._file, self._file.names[name]
        value = file.tensor(kept)
        if name == ROTARY:
            return _frequencies(file) / value
        if file.architecture.startswith("gemma") and kept.endswith("norm.weight"):
            return value - 1
        return _halves(file, kept, value)


def _halves(file: GgufFile, kept: str, value: Tensor) -> Tensor:
    """Orders rows of queries and keys as in transformers, which rotates halves of a head."""
    heads = {
        "attn_q": file.get("attention.head_count"),
        "attn_k": file.get("attention.head_count_kv", file.get("attention.head_count")),
    }.get(kept.split(".")[-2])
    if file.architecture != "llama" or heads is None:
        return value
    # llama.cpp stores the rows of a head in pairs.
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_tensors(path: Path, packed: bool) -> dict[str, Tensor]:
    """Reads all tensors of a model; with `packed`, 4-bit ones stay in the format of `to_int4`."""
    file, weights, found = open_file(path), GgufWeights(path), dict[str, Tensor]()
    for name, kept in file.names.items():
        pair = file.int4(kept) if packed and name.endswith("_proj.weight") else None
        if pair is None:
            found[name] = weights.value(name)
        else:
            found[name], found[f"{name}_scale"] = (_halves(file, kept, one) for one in pair)
    return found


class _NoWeights(Weights):
    """Placeholder for the weight files of models whose weights are all computed."""

    def __init__(self, path: Path) -> None:
        self.path, self.files, self.infos = path, [path], {}

    def read(self, wanted: Mapping[str, Part]) -> None:
        assert not wanted, "all tensors are computed"

    def close(self) -> None:
        pass


def _frequencies(file: GgufFile) -> Tensor:
    dim = file.get("rope.dimension_count")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / file.get("rope.freq_base", 1e4) ** exponents


# Tokenizers: byte-level BPE with merges in the file ("gpt2"), and SentencePiece ("llama"), whose
# merges are derived from its pieces.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.replace("DIGITS", r"\p{N}{1,3}"), _WORDS.replace("DIGITS", r"\p{N}")
_ONE_DIGIT = (r"\p{N}", _GPT2)
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "codeshell", "refact", "command-r"), _ONE_DIGIT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
}
"""Regular expressions that split texts before merges, by their name in the file."""
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<eos>", "</s>")
"""Control tokens that always end a completion, as in llama.cpp."""


def read_tokenizer(path: Path) -> Any:
    import tokenizers

    file = open_file(path)
    about: dict[str, Any] = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = about.get("model"), about.get("tokens", [])
    if kind not in _BUILDERS:
        raise GulliverError(f"{path}: tokenizer type {kind!r} is not supported; use gpt2 or llama")
    built = _BUILDERS[kind](path, about)
    types = about.get("token_type", [])
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        made = [tokenizers.AddedToken(t, normalized=False, special=special) for t in added]
        (built.add_special_tokens if special else built.add_tokens)(made)
    named = {
        f"{name}_token": tokens[about[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in about
    }
    # SentencePiece files without this key do have a token that begins a text.
    if about.get("add_bos_token", kind == "llama") and "bos_token" in named:
        begin = named["bos_token"]
        built.post_processor = tokenizers.processors.TemplateProcessing(
            f"{begin} $A", f"{begin} $A {begin} $B", [(begin, about["bos_token_id"])]
        )
    template = file.metadata.get("tokenizer.chat_template")
    if is_plain(template):
        return FileTokenizer(built, template, named)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=template, **named)


def end_ids(path: Path) -> list[int]:
    metadata = open_file(path).metadata
    tokens, types = (metadata.get(f"tokenizer.ggml.{k}", []) for k in ("tokens", "token_type"))
    ends = {
        metadata[key]
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if key in metadata
    }
    pairs = enumerate(zip(tokens, types, strict=False))
    return sorted(ends | {n for n, (t, type_) in pairs if type_ == CONTROL and t in ENDS})


def _byte_level(path: Path, about: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = about.get("pre", "default")
    if split not in SPLITS:
        raise GulliverError(
            f"{path}: the pre-tokenizer {split!r} is not supported; use a file with one of "
            f"{', '.join(SPLITS)}"
        )
    vocabulary = {token: number for number, token in enumerate(about["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in about["merges"]]
    built = Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=split in ("llama3", "llama-bpe"))
    )
    steps = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[split]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_])
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_pieces(path: Path, about: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    del path
    space, prefix = "\u2581", bool(about.get("add_space_prefix", True))
    vocabulary = {token: number for number, token in enumerate(about["tokens"])}
    unknown = about["tokens"][about.get("unknown_token_id", 0)]
    merges = _merges(about)
    built = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    front = [normalizers.Prepend(space)] if prefix else []
    built.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", space)])
    back = [decoders.Strip(" ", 1, 0)] if prefix else []
    plain = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*plain, *back])
    return built


def _merges(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns pairs of tokens that merge into one token, best score first."""
    types, scores = about["token_type"], about["scores"]
    pieces = [t for t, type_ in zip(about["tokens"], types, strict=True) if type_ == NORMAL]
    known = set(pieces)
    by_score = {t: s for t, s in zip(about["tokens"], scores, strict=True) if t in known}
    pieces.sort(key=lambda piece: -by_score[piece])
    return [
        (piece[:at], piece[at:])
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentence_pieces}

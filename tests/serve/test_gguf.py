"""GGUF files: formats of blocks, whole models beside transformers, tokenizers, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from gulliver import LLM, SamplingParams
from gulliver.errors import GulliverError
from gulliver.serve.gguf import FORMATS, GgufFile, build_config, read_tokenizer

transformers = pytest.importorskip("transformers")

NAMES = {one.name: number for number, one in FORMATS.items()}
TEXT, LIST, INT, FLOAT, FLAG = 8, 9, 4, 6, 7


def packed(value: Any) -> bytes:
    """A value of the metadata, its type before it."""
    match value:
        case bool():
            return struct.pack("<I?", FLAG, value)
        case int():
            return struct.pack("<II", INT, value)
        case float():
            return struct.pack("<If", FLOAT, value)
        case str():
            return struct.pack("<I", TEXT) + text(value)
        case list():
            made = [packed(one) for one in value]
            return (
                struct.pack("<I", LIST)
                + made[0][:4]
                + struct.pack("<Q", len(made))
                + b"".join(one[4:] for one in made)
            )
    raise TypeError(value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def quantized(values: np.ndarray[Any, Any], kind: str) -> bytes:
    """Rounds weights to a format; only its layout matters here."""
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    blocks = values.reshape(-1, 32)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        whole = np.rint(blocks / np.maximum(scale, 1e-6)).clip(-127, 127).astype(np.int8)
        return b"".join(s.tobytes() + w.tobytes() for s, w in zip(scale, whole, strict=True))
    assert kind == "Q4_0"
    scale = (np.abs(blocks).max(1, keepdims=True) / 7).astype("<f2")
    whole = (np.rint(blocks / np.maximum(scale, 1e-6)) + 8).clip(0, 15).astype(np.uint8)
    pairs = whole[:, :16] | whole[:, 16:] << 4
    return b"".join(s.tobytes() + w.tobytes() for s, w in zip(scale, pairs, strict=True))


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[Any, str]]) -> Path:
    """Writes a file as the format's specification has it."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + packed(value) for key, value in metadata.items())
    body = b""
    for name, (values, kind) in tensors.items():
        body += bytes(-len(body) % 32)
        head += text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", NAMES[kind], len(body))
        body += quantized(values, kind)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


BYTES = sorted(ByteLevel.alphabet())
TOKENS = [*BYTES, "th", "the", "Ġthe", "Ġ1", "<|im_end|>", "<|im_start|>"]
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
    "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "Ġ 1"],
    "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>"
    "{% endfor %}",
}
PIECES = ["<unk>", "<bos>", "<eos>", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "t", "h", "e", "a", "th", "he", "the", "▁the"]
SCORES = [0.0] * 260 + [-9.0, -9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0, -4.0]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * 9,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_space_prefix": False,
}
SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 32,
    "rope.freq_base": 5e4,
}
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def llama_name(name: str, gemma: bool) -> str:
    front, _, kind = name.rpartition(".")
    parts = PARTS | (GEMMA if gemma else {})
    if front in parts:
        return f"{parts[front]}.{kind}"
    pieces = front.split(".")
    return f"blk.{pieces[2]}.{parts[pieces[-1]]}.{kind}"


def made(folder: Path, kind: str, matrix: str, tokenizer: dict[str, Any]) -> tuple[Path, Any]:
    """A file of a random model, and transformers' model with the rounded weights."""
    about: dict[str, Any] = {f"{kind}.{key}": value for key, value in SIZES.items()}
    if kind == "gemma3":
        about["gemma3.attention.sliding_window"] = 8
    about = {"general.architecture": kind} | about | tokenizer
    vocabulary = len(tokenizer["tokenizer.ggml.tokens"])
    empty = {"token_embd.weight": (np.zeros((vocabulary, 64)), "F32")}
    if kind != "gemma3":
        empty["output.weight"] = empty["token_embd.weight"]
    config = build_config(write(folder / "empty.gguf", about, empty))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors, rounded = {}, {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = parameter.numpy()
        if value.ndim == 1:
            value = value + np.random.default_rng(len(name)).normal(0, 0.1, value.shape)
            value = value.astype(np.float32)
        rounded[name] = torch.from_numpy(value)
        form = matrix if value.ndim == 2 else "F32"
        if form != "F32":
            flat = torch.frombuffer(bytearray(quantized(value, form)), dtype=torch.uint8)
            one = FORMATS[NAMES[form]]
            rounded[name] = one.dequantize(flat.view(-1, one.bytes)).view(value.shape)
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = value.reshape(-1, 2, 16, 64).swapaxes(1, 2).reshape(value.shape)
        if kind == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        tensors[llama_name(name, kind == "gemma3")] = (value, form)
    model.load_state_dict(rounded, strict=False)
    return write(folder / f"{kind}.gguf", about, tensors), model.eval()


@pytest.mark.parametrize(
    ("kind", "matrix", "tokenizer"),
    [
        ("llama", "Q8_0", BPE),
        ("llama", "Q4_0", SPM),
        ("qwen2", "F16", BPE),
        ("qwen3", "F32", BPE),
        ("gemma3", "Q8_0", SPM),
    ],
)
def test_a_file_gives_the_tokens_of_transformers_with_its_weights(
    tmp_path: Path, kind: str, matrix: str, tokenizer: dict[str, Any]
) -> None:
    path, model = made(tmp_path, kind, matrix, tokenizer)
    prompts = [[5, 6, 7], list(range(20, 41)), [9] * 12]
    with LLM(path, cache_tokens=512) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(24):
            with torch.no_grad():
                best = model(tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, best.view(1, 1)], 1)
        assert output.outputs[0].token_ids == tokens[0, len(prompt) :].tolist()


def test_blocks_are_dequantised_as_transformers_does() -> None:
    module = pytest.importorskip("transformers.integrations.gguf.dequant")
    draw = np.random.default_rng(0)
    for number in module.GGML_BLOCK.keys() & FORMATS.keys():
        one = FORMATS[number]
        blocks = torch.from_numpy(draw.integers(0, 60, (50, one.bytes), dtype=np.uint8))
        found = one.dequantize(blocks).flatten()
        torch.testing.assert_close(found, module.dequantize(blocks, number), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1"])
def test_blocks_of_five_bits_are_dequantised_weight_by_weight(name: str) -> None:
    one, draw = FORMATS[NAMES[name]], np.random.default_rng(1)
    raw = draw.integers(0, 60, (20, one.bytes), dtype=np.uint8)
    front = one.bytes - 20
    for block, found in zip(raw, one.dequantize(torch.from_numpy(raw)), strict=True):
        scale = block[:2].view("<f2").astype(np.float32)[0]
        least = block[2:4].view("<f2").astype(np.float32)[0] if front == 4 else -16 * scale
        high = int(block[front : front + 4].view("<u4")[0])
        for place, weight in enumerate(found.tolist()):
            byte = int(block[front + 4 + place % 16])
            bits = (byte >> 4 if place >= 16 else byte & 15) | (high >> place & 1) << 4
            assert weight == pytest.approx(bits * scale + least, rel=1e-5, abs=1e-6)


def test_tokenizers_and_the_chat_template_are_those_of_the_file(tmp_path: Path) -> None:
    empty = {"token_embd.weight": (np.zeros((len(TOKENS), 64)), "F32")}
    path = write(tmp_path / "bpe.gguf", {"general.architecture": "llama"} | BPE, empty)
    words = read_tokenizer(path)
    ids = words(" the then 12 é<|im_end|>")["input_ids"]
    # Digits stand alone, so that the merge with a space does not happen.
    wanted = ["Ġthe", "Ġthe", "n", "Ġ", "1", "2", "Ġ", "Ã", "©", "<|im_end|>"]
    assert [TOKENS[token] for token in ids] == wanted
    assert words.decode(ids, skip_special_tokens=True) == " the then 12 é"
    talk = words.apply_chat_template([{"role": "user", "content": "the"}])["input_ids"]
    assert [TOKENS[token] for token in talk] == ["<|im_start|>", "the", "<|im_end|>"]
    path = write(tmp_path / "spm.gguf", {"general.architecture": "llama"} | SPM, empty)
    pieces = read_tokenizer(path)
    ids = pieces("the hea\n\né")["input_ids"]
    # "he" goes before "th", and "\n\n" is a token of the user's.
    wanted = ["<bos>", "the", "▁", "he", "a", "\n\n", "<0xC3>", "<0xA9>"]
    assert [PIECES[token] for token in ids] == wanted
    assert pieces.decode(ids, skip_special_tokens=True) == "the hea\n\né"


def test_files_that_are_no_models_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "llama", "Q8_0", BPE)
    whole = path.read_bytes()
    for size in (0, 3, 30, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(GulliverError, match=r"cut\.gguf"):
            GgufFile(tmp_path / "cut.gguf")
    for key, value in (("general.architecture", "mamba"), ("tokenizer.ggml.pre", "odd")):
        about = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in SIZES.items()}
        other = about | BPE | {key: value}
        empty = {"token_embd.weight": (np.zeros((len(TOKENS), 64)), "F32")}
        file = write(tmp_path / f"{value}.gguf", other, empty)
        with pytest.raises(GulliverError, match=value):
            LLM(file)

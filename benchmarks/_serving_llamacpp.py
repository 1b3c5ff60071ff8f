"""llama.cpp beside `gulliver.serve`: the same weights as GGUF, through its own server's batching.

A Llama of transformers is written as GGUF in float32 or Q8_0 (the `gguf` package); its queries and
keys are laid out as llama.cpp's rotation wants them. What answers is llama.cpp's server within this
process, by the `xllamacpp` package, whose wheel has llama.cpp built: as many slots as requests, so
that all run at a time. Prompts are tokens, and so are answers.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

FORMATS = ("f32", "q8_0")
MISSING = "not beside it: llama.cpp (pip install xllamacpp gguf)"


def has_llamacpp() -> bool:
    """Whether llama.cpp and the writer of its files are installed."""
    return all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf"))


def write_gguf(model: Any, path: Path, kind: str) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    whole = gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_Q8_0
    writer.add_file_type(whole)
    _add_words(writer, config.vocab_size)
    for name, value in model.state_dict().items():
        known = _named(name)
        if known is None:
            continue
        array = _turned(name, value, config).contiguous().numpy()
        if kind == "f32" or array.ndim == 1:
            writer.add_tensor(known, array)
        else:
            form = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(known, gguf.quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: Any, count: int) -> None:
    """A vocabulary of words that nobody writes: prompts and answers are tokens."""
    import gguf  # pyright: ignore[reportMissingImports]

    kinds = gguf.TokenType
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    words += [f"w{number}" for number in range(len(words), count)]
    types += [kinds.NORMAL] * (count - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _named(name: str) -> str | None:
    """Name in the file; None for the head, which is the embedding."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if not name.startswith("model.layers."):
        return None
    number, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{_PARTS[part.removesuffix('.weight')]}.weight"


def _turned(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of queries and keys in pairs that llama.cpp rotates: halves become neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return value
    rows, columns = value.shape
    pairs = value.view(count, 2, rows // count // 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


class LlamaCpp:
    """llama.cpp's server with a model's weights."""

    def __init__(self, model: Any, kind: str, most: int, longest: int, tokens: int) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / f"{kind}.gguf"
        write_gguf(model, path, kind)
        asked = xllamacpp.CommonParams()
        asked.model.path = str(path)
        asked.n_parallel, asked.n_ctx = most, most * longest
        asked.n_batch = asked.n_ubatch = tokens
        asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = torch.get_num_threads()
        # Keys and values as here; and no prompt is found that another one left.
        asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        asked.cache_prompt, asked.warmup, asked.port = False, True, 0
        asked.verbosity = 0
        self.info = str(xllamacpp.get_system_info())
        self._server, self._most = xllamacpp.Server(asked), most

    def run(self, requests: Sequence[Any]) -> tuple[list[list[int]], float]:
        """Answers requests that come at once; returns answers and seconds."""
        url = f"{self._server.listening_address}/completion"

        def one(request: Any) -> list[int]:
            body = {
                "prompt": request.prompt,
                "n_predict": request.count,
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            }
            asked = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked) as found:
                return json.loads(found.read())["tokens"]

        with ThreadPoolExecutor(self._most) as pool:
            begun = time.perf_counter()
            answers = list(pool.map(one, requests))
            return answers, time.perf_counter() - begun

    def close(self) -> None:
        """Stops the server and removes its file."""
        del self._server
        self._folder.cleanup()

"""llama.cpp beside us: a transformers Llama as a GGUF file of 8 bits, continued greedily.

It needs llama-cpp-python and gguf. Where they are not to be installed among everything else, they
may lie in a folder of ``PYTHONPATH``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT, NEW, ROOM = 16, 16, 64
"""Tokens of a prompt, tokens that are added, and room for both: as of `generation_seconds`."""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Any, path: Path) -> None:
    """Writes a Llama with all its matrices in Q8_0: 32 numbers share a scale."""
    import gguf  # pyright: ignore[reportMissingImports]

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    eight = gguf.GGMLQuantizationType.Q8_0
    for name, value in model.state_dict().items():
        array = _array(name, value, config)
        if array.ndim > 1:
            packed = gguf.quants.quantize(array, eight)
            writer.add_tensor(_name(name), packed, raw_dtype=eight)
        else:
            writer.add_tensor(_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    path = name.removesuffix(".weight")
    if path in outside:
        return f"{outside[path]}.weight"
    _, _, number, rest = path.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}.weight"


def _array(name: str, value: torch.Tensor, config: Any) -> np.ndarray:
    """A weight as llama.cpp has it, whose rotary codes turn neighbours rather than halves."""
    array = value.detach().float().numpy()
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return array


class LlamaCpp:
    """A model in llama.cpp.

    Args:
        path: GGUF file.
        threads: threads that compute.
        sequences: most sequences at once.
    """

    def __init__(self, path: Path, threads: int, sequences: int = 8) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.api: Any = llama_cpp
        llama_cpp.llama_log_set(_quiet(llama_cpp), None)
        llama_cpp.llama_backend_init()
        asked = llama_cpp.llama_model_default_params()
        asked.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), asked)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = ROOM * sequences
        wanted.n_batch = wanted.n_ubatch = PROMPT * sequences
        wanted.n_seq_max = sequences
        wanted.n_threads = wanted.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, wanted)
        self.batch = llama_cpp.llama_batch_init(PROMPT * sequences, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.words = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def logits(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Logits after the last of so many tokens of each sequence: ``[sequences, vocabulary]``.

        Args:
            ids: ``[sequences, tokens]``.
            start: position of the first.
        """
        batch, (sequences, tokens) = self.batch, ids.shape
        batch.n_tokens = ids.size
        for row in range(sequences):
            for at in range(tokens):
                place = row * tokens + at
                batch.token[place], batch.pos[place] = int(ids[row, at]), start + at
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = at == tokens - 1
        failed = self.api.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        lasts = ((row + 1) * tokens - 1 for row in range(sequences))
        found = (self.api.llama_get_logits_ith(self.context, place) for place in lasts)
        return np.stack([np.ctypeslib.as_array(row, (self.words,)) for row in found])

    def begin(self) -> None:
        """Forgets all sequences."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def seconds(self, batch: int) -> float:
        """Seconds in which prompts are continued greedily, as `generation_seconds` does it."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(self.words, (batch, PROMPT), generator=draw).numpy()
        self.begin()
        begun = time.perf_counter()
        for number in range(NEW):
            start = PROMPT + number - 1 if number else 0
            ids = self.logits(ids, start).argmax(1)[:, None]
        return time.perf_counter() - begun


_kept: list[Any] = []


def _quiet(api: Any) -> Any:
    @api.llama_log_callback
    def ignore(level: int, text: bytes, data: Any) -> None:
        pass

    _kept.append(ignore)
    return ignore


def apart(model: Any, path: Path, threads: int) -> float:
    """Relative distance of llama.cpp's logits from the float model's: that both are one model."""
    ids = torch.randint(model.config.vocab_size, (2, PROMPT), generator=torch.Generator())
    peer = LlamaCpp(path, threads)
    with torch.no_grad():
        wanted = model(ids).logits[:, -1].float().numpy()
    found = peer.logits(ids.numpy(), 0)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

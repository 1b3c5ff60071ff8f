"""Creates a tiny model, its tokenizer and conversations in seconds and offline.

    make_example(Path("out/example"))

The model is a byte-level Llama with random weights. The task is to write words in capitals; words
consist of random syllables, so that held-out words distinguish learning from memorizing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
SYLLABLES = tuple(f"{a}{b}" for a in "bdfgklmnprstvwz" for b in "aeiou")
CONTEXT = 256


def make_example(folder: Path, rows: int = 1500, seed: int = 0) -> tuple[Path, Path]:
    """Writes a tiny model and a dataset, for a first run of ``gulliver finetune``.

    Args:
        folder: folder to write; it must be empty or not exist.
        rows: number of conversations.
        seed: seed for weights and words.

    Returns:
        The folder with the model and its tokenizer, and the file of conversations (JSON Lines).

    Raises:
        GulliverError: the folder is not empty, or transformers is not installed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise GulliverError(f"{folder} is not empty; pass an empty or new folder")
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise missing_extra("the example needs transformers", "finetune") from None
    import torch

    model, tokenizer = folder / "model", _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    made.save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = folder / "capitals.jsonl"
    draw = random.Random(seed)
    lines = (json.dumps({"messages": _conversation(draw)}) for _ in range(rows))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return model, data


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def _conversation(draw: random.Random) -> list[dict[str, str]]:
    messages = []
    for _ in range(draw.choice((1, 1, 2))):
        word = "".join(draw.choices(SYLLABLES, k=draw.randint(2, 5)))
        messages.append({"role": "user", "content": f"Write in capitals: {word}"})
        messages.append({"role": "assistant", "content": word.upper()})
    return messages

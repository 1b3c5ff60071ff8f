"""Tiny tokenizers and chat templates, made without a network."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROLES = "<|{{ m.role }}|>"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}" + ROLES + "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}" + ROLES + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}" + ROLES + "{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Drops the thoughts of all answers but the last, as templates of thinking models do."""
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + PLAIN
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "write the words in capitals: THE QUICK BROWN FOX",
    "questions and answers; the answer is: forty-two!\n\nThe end.",
]


@cache
def _trained(kind: str) -> str:
    """A tokenizer with merges, so that texts next to each other share tokens."""
    made = Tokenizer(models.BPE())
    if kind == "metaspace":
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    else:
        # One piece for a whole text: merges reach over spaces and from a prompt to its answer.
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[
            "<unk>",
            "<s>",
            "</s>",
            "<|end|>",
            "<|user|>",
            "<|assistant|>",
            "<|system|>",
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    return made.to_str()


def tokenizer_of(kind: str = "merging", template: str | None = PLAIN, begins: bool = True) -> Any:
    """A tokenizer of transformers.

    Args:
        kind: ``merging`` (bytes, with merges over anything) or ``metaspace``.
        template: chat template; None for none.
        begins: put <s> before each text.
    """
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_str(_trained(kind))
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=template,
    )

"""Fine-tuning of language models: texts to batches, and the run that learns from them.

The names are those of `public.py`; they are imported when the first of them is asked for, so that
the options in `_config.py` can be read without torch. The data half, in the order that texts take:
`rows.py` (files to rows), `rows.py` (what a row says), `_chat.py` and `_encode.py` (tokens, and
which of them are learnt), `texts.py` (the whole data set), `_batches.py` (its order and batches)
and `_documents.py` (for which models packed batches are exact).
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.finetune.batches import make_batches, packing_support
    from gulliver.finetune.config import DataConfig, FinetuneConfig, check_data, check_finetune
    from gulliver.finetune.encode import Example, load_tokenizer, split
    from gulliver.finetune.example import make_example
    from gulliver.finetune.finetuner import finetune
    from gulliver.finetune.rows import BadRow, Form, Row, read_rows, recognise
    from gulliver.finetune.texts import TextData, read_text
    from gulliver.jobs.loop import Outcome

__all__ = [
    "BadRow",
    "DataConfig",
    "Example",
    "FinetuneConfig",
    "Form",
    "Outcome",
    "Row",
    "TextData",
    "check_data",
    "check_finetune",
    "finetune",
    "load_tokenizer",
    "make_batches",
    "make_example",
    "packing_support",
    "read_rows",
    "read_text",
    "recognise",
    "split",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.finetune.batches": ["make_batches", "packing_support"],
        "gulliver.finetune.config": [
            "DataConfig",
            "FinetuneConfig",
            "check_data",
            "check_finetune",
        ],
        "gulliver.finetune.encode": ["Example", "load_tokenizer", "split"],
        "gulliver.finetune.example": ["make_example"],
        "gulliver.finetune.finetuner": ["finetune"],
        "gulliver.finetune.rows": ["BadRow", "Form", "Row", "read_rows", "recognise"],
        "gulliver.finetune.texts": ["TextData", "read_text"],
        "gulliver.jobs.loop": ["Outcome"],
    },
)

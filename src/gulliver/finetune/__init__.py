"""Fine-tuning of language models: data preparation and training.

Texts pass through `rows.py` (files to rows), `texts.py` (rows to tokens and labels) and
`batches.py`; `finetuner.py` trains.
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

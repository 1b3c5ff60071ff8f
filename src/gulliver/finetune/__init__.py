"""Fine-tuning of language models: data preparation and training.

Texts pass through `rows.py` (files to rows), `texts.py` (rows to tokens and labels) and
`batches.py`; `finetuner.py` trains.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.finetune.batches import make_batches, packing_support
    from gulliver.finetune.config import DataConfig, FinetuneConfig
    from gulliver.finetune.encode import Example, load_tokenizer, split
    from gulliver.finetune.example import make_example
    from gulliver.finetune.finetuner import finetune
    from gulliver.finetune.rows import Row
    from gulliver.finetune.texts import read_text
    from gulliver.jobs.loop import Outcome

__all__ = [
    "DataConfig",
    "Example",
    "FinetuneConfig",
    "Outcome",
    "Row",
    "finetune",
    "load_tokenizer",
    "make_batches",
    "make_example",
    "packing_support",
    "read_text",
    "split",
]

__getattr__, __dir__ = lazy_exports(__name__)

"""Fine-tuning of language models: data preparation and training.

Texts pass through `rows.py` (files to rows), `texts.py` (rows to tokens and labels) and
`batches.py`; `finetuner.py` trains.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.finetune.batches import make_batches as make_batches
    from gulliver.finetune.batches import packing_support as packing_support
    from gulliver.finetune.config import DataConfig as DataConfig
    from gulliver.finetune.config import FinetuneConfig as FinetuneConfig
    from gulliver.finetune.encode import Example as Example
    from gulliver.finetune.encode import load_tokenizer as load_tokenizer
    from gulliver.finetune.encode import split as split
    from gulliver.finetune.example import make_example as make_example
    from gulliver.finetune.finetuner import finetune as finetune
    from gulliver.finetune.rows import Row as Row
    from gulliver.finetune.texts import read_text as read_text
    from gulliver.jobs.loop import Outcome as Outcome

__getattr__, __dir__ = lazy_exports(__name__)

"""The public names of `gulliver.finetune`, imported when one of them is asked for."""

from gulliver.finetune._adapters import adapter_name, fill_adapters
from gulliver.finetune._base import fingerprint_of
from gulliver.finetune._batches import make_batches
from gulliver.finetune._config import DataConfig, check_data
from gulliver.finetune._documents import packing_support
from gulliver.finetune._encode import Example, load_tokenizer, split
from gulliver.finetune._example import make_example
from gulliver.finetune._finetune import finetune
from gulliver.finetune._forms import Form, recognise
from gulliver.finetune._job_config import FinetuneConfig, check_finetune
from gulliver.finetune._mapped import map_weights
from gulliver.finetune._planning import PlannedRun, fitting
from gulliver.finetune._rows import BadRow, Row, read_rows
from gulliver.finetune._run import FinetuneRun
from gulliver.finetune._texts import TextData, read_text
from gulliver.jobs._loop import Outcome

__all__ = [
    "BadRow",
    "DataConfig",
    "Example",
    "FinetuneConfig",
    "FinetuneRun",
    "Form",
    "Outcome",
    "PlannedRun",
    "Row",
    "TextData",
    "adapter_name",
    "check_data",
    "check_finetune",
    "fill_adapters",
    "finetune",
    "fingerprint_of",
    "fitting",
    "load_tokenizer",
    "make_batches",
    "make_example",
    "map_weights",
    "packing_support",
    "read_rows",
    "read_text",
    "recognise",
    "split",
]

"""Data preparation: from a folder of clips to a table, and to the latents that one trains on.

Read `_table.py` first, then `_work.py`; the other files are one step of the way each. The names are
imported when the first of them is asked for, so that a table is filtered without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.video.preparation._caption import Captioned, caption
    from gulliver.video.preparation._cut import CutReport, cut
    from gulliver.video.preparation._cut_settings import CutSettings
    from gulliver.video.preparation._dedup import Deduplicated, Pair, deduplicate
    from gulliver.video.preparation._encode import Encoded, check_encode, encode
    from gulliver.video.preparation._filter import Filtered, filter_file, filter_table
    from gulliver.video.preparation._samples import Samples, take_samples
    from gulliver.video.preparation._scan import Scanned, read_facts, scan
    from gulliver.video.preparation._score import Scored, find_scorers, score
    from gulliver.video.preparation._scorers import IN_THE_BOX
    from gulliver.video.preparation._show import show
    from gulliver.video.preparation._table import Table, broken_path, read_broken, write_broken
    from gulliver.video.preparation._work import FileOutcome, work_on

__all__ = [
    "IN_THE_BOX",
    "Captioned",
    "CutReport",
    "CutSettings",
    "Deduplicated",
    "Encoded",
    "FileOutcome",
    "Filtered",
    "Pair",
    "Samples",
    "Scanned",
    "Scored",
    "Table",
    "broken_path",
    "caption",
    "check_encode",
    "cut",
    "deduplicate",
    "encode",
    "filter_file",
    "filter_table",
    "find_scorers",
    "read_broken",
    "read_facts",
    "scan",
    "score",
    "show",
    "take_samples",
    "work_on",
    "write_broken",
]

_MODULES = {
    "_caption": ("Captioned", "caption"),
    "_cut": ("CutReport", "cut"),
    "_cut_settings": ("CutSettings",),
    "_dedup": ("Deduplicated", "Pair", "deduplicate"),
    "_encode": ("Encoded", "check_encode", "encode"),
    "_filter": ("Filtered", "filter_file", "filter_table"),
    "_samples": ("Samples", "take_samples"),
    "_scan": ("Scanned", "read_facts", "scan"),
    "_score": ("Scored", "find_scorers", "score"),
    "_scorers": ("IN_THE_BOX",),
    "_show": ("show",),
    "_table": ("Table", "broken_path", "read_broken", "write_broken"),
    "_work": ("FileOutcome", "work_on"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

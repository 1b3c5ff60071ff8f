"""Data preparation: from a folder of clips to a table, and to the latents that one trains on.

Read `_table.py` first, then `_work.py`; the other files are one step of the way each. The names are
imported when the first of them is asked for, so that a table is filtered without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.video.preparation._encode import Encoded, check_encode, encode
    from gulliver.video.preparation._filter import Filtered, filter_file, filter_table
    from gulliver.video.preparation._scan import Scanned, read_facts, scan
    from gulliver.video.preparation._table import Table, broken_path, write_broken
    from gulliver.video.preparation._work import Outcome, work_on

__all__ = [
    "Encoded",
    "Filtered",
    "Outcome",
    "Scanned",
    "Table",
    "broken_path",
    "check_encode",
    "encode",
    "filter_file",
    "filter_table",
    "read_facts",
    "scan",
    "work_on",
    "write_broken",
]

_MODULES = {
    "_encode": ("Encoded", "check_encode", "encode"),
    "_filter": ("Filtered", "filter_file", "filter_table"),
    "_scan": ("Scanned", "read_facts", "scan"),
    "_table": ("Table", "broken_path", "write_broken"),
    "_work": ("Outcome", "work_on"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

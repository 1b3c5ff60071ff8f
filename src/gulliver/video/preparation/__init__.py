"""Data preparation: from a folder of clips to a table and to latents for training.

Start with `table.py` and `work.py`; every other module is one preparation step.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.video.preparation.cutting import cut as cut
    from gulliver.video.preparation.encoding import encode as encode
    from gulliver.video.preparation.filtering import filter_table as filter_table
    from gulliver.video.preparation.packets import Samples as Samples
    from gulliver.video.preparation.scanning import scan as scan
    from gulliver.video.preparation.scoring import score as score
    from gulliver.video.preparation.table import Table as Table

__getattr__, __dir__ = lazy_exports(__name__)

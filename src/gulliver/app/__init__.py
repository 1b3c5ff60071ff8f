"""The page of a run: prompts, pictures and settings in a browser, clips as they are made.

Start with `service.py`, which serves users in turn and outlives the sampling process of
`worker.py`. gradio is imported by `page.py` and `server.py` alone.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.app.server import Page

__all__ = ["Page"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.app.server": ["Page"],
    },
)

"""The page of a run: prompts, pictures and settings in a browser, clips as they are made.

Read `_messages.py`, then `_worker.py`, the process that samples, and `service.py`, which serves
users in turns and outlives the process. `gallery.py` keeps clips, `_training.py` looks at a run
that may still be training, `_page.py` shows all of it and `_server.py` puts it on a port. gradio is
imported by these two alone. Nothing here knows how a clip is made: that is `gulliver.video`.
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

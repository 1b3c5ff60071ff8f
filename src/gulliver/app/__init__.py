"""The page of a run: prompts, pictures and settings in a browser, clips as they are made.

Read `_messages.py`, then `_worker.py`, the process that samples, and `_service.py`, which serves
users in turns and outlives the process. `_gallery.py` keeps clips, `_training.py` looks at a run
that may still be training, `_page.py` shows all of it and `_server.py` puts it on a port. gradio is
imported by these two alone. Nothing here knows how a clip is made: that is `gulliver.video`.
"""

from gulliver.app._messages import Failed, Made, Settings, Source, Stopped
from gulliver.app._server import Page, find_run, open_page, serve
from gulliver.app._service import Service

__all__ = [
    "Failed",
    "Made",
    "Page",
    "Service",
    "Settings",
    "Source",
    "Stopped",
    "find_run",
    "open_page",
    "serve",
]

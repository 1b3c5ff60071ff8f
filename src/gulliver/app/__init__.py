"""The web page of a run: prompts, images and settings in a browser.

Start with `service.py`, which serves users in turn and restarts the sampling process of
`worker.py`. Only `page.py` and `server.py` import gradio.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.app.server import Page as Page

__getattr__, __dir__ = lazy_exports(__name__)

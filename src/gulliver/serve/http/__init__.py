"""OpenAI-compatible server for the engine.

    with Server(LLM("folder"), ServerOptions(port=0)) as server:
        print(server.url)

Names are imported lazily.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.http.options import ServerOptions as ServerOptions
    from gulliver.serve.http.server import Server as Server

__getattr__, __dir__ = lazy_exports(__name__, extra="serve")

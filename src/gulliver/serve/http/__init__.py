"""OpenAI-compatible server for the engine, and a load generator for any such server.

    from gulliver.serve.http import Server, ServerOptions
    with Server(LLM("folder"), ServerOptions(port=0)) as server:
        print(server.url)

Names are imported lazily: the load generator only needs httpx.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.http.load import Measured, RequestTiming, generate_load
    from gulliver.serve.http.options import Load, ServerOptions
    from gulliver.serve.http.server import Server

__all__ = ["Load", "Measured", "RequestTiming", "Server", "ServerOptions", "generate_load"]

__getattr__, __dir__ = lazy_exports(__name__, extra="serve")

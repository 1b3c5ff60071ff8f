"""A server of OpenAI's interface over the engine, and a generator of load for any such server.

    from gulliver.serve.http import Server, ServerOptions
    with Server(LLM("folder"), ServerOptions(port=0)) as server:
        print(server.url)

Names are imported when the first of them is used: the generator of load needs httpx alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gulliver.errors import missing_extra

if TYPE_CHECKING:
    from gulliver.serve.http._limits import Load, ServerOptions
    from gulliver.serve.http._load import generate_load
    from gulliver.serve.http._measured import Measured, RequestTiming
    from gulliver.serve.http._server import Server

_PLACES = {
    "Load": "_limits",
    "Measured": "_measured",
    "RequestTiming": "_measured",
    "Server": "_server",
    "ServerOptions": "_limits",
    "generate_load": "_load",
}
__all__ = ["Load", "Measured", "RequestTiming", "Server", "ServerOptions", "generate_load"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(name)
    try:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gulliver"):
            raise
        raise missing_extra(f"the server and its load need {error.name}", "serve") from None

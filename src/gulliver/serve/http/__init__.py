"""Doors of the engine: a server that speaks OpenAI's interface, and a generator of load.

    from gulliver.serve.http import Server, ServerOptions
    with Server(LLM("folder"), ServerOptions(port=0)) as server:
        print(server.url)

Read `_server.py` (socket, signals, drain), `_app.py` (routes), `_requests.py` (what a client may
ask), `_reply.py` over `_worker.py` (the engine in its thread, events back to the loop) and
`_answers.py` (events as JSON), `_protocol.py` (connections: their number, their patience),
`_metrics.py`; then `_load.py` with `_measured.py`, which know nothing of the others.

Names are imported when the first of them is asked for: the generator of load needs httpx alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gulliver.errors import missing_extra

if TYPE_CHECKING:
    from gulliver.serve.http._limits import ServerOptions
    from gulliver.serve.http._load import Load, generate_load
    from gulliver.serve.http._measured import Measured, Sample
    from gulliver.serve.http._server import Server

_PLACES = {
    "Load": "_load",
    "Measured": "_measured",
    "Sample": "_measured",
    "Server": "_server",
    "ServerOptions": "_limits",
    "generate_load": "_load",
}
__all__ = ["Load", "Measured", "Sample", "Server", "ServerOptions", "generate_load"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(name)
    try:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gulliver"):
            raise
        raise missing_extra(f"the server and its load need {error.name}", "serve") from None

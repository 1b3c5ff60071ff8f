"""The engine's model over several processes: layers cut over tensor ranks, dealt to stages.

    runner = start_ranks(folder, ModelOptions(tensor=2, pipeline=2), sequences=64)

Read `_layout.py` (who has what), `_stage.py` (one rank's part of the model over its pages),
`_worker.py` (commands in, carries and logits out), `llm.py` (the controller) and
`_processes.py` (starting and ending the ranks).

What it does not know: requests, tokens' meaning, sockets other than its own.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.ranks.controller import best_in_flight

__all__ = ["best_in_flight"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.serve.ranks.controller": ["best_in_flight"],
    },
)

"""The engine's model over several processes: layers cut over tensor ranks, dealt to stages.

    runner = start_ranks(folder, ModelOptions(tensor=2, pipeline=2), sequences=64)

Read `_layout.py` (who has what), `_stage.py` (one rank's part of the model over its pages),
`_worker.py` (commands in, carries and logits out), `_runner.py` (the controller) and
`_processes.py` (starting and ending the ranks).

What it does not know: requests, tokens' meaning, sockets other than its own.
"""

from gulliver.serve.ranks._layout import Layout, RankPlace, plan_ranks
from gulliver.serve.ranks._processes import start_ranks
from gulliver.serve.ranks._runner import RanksRunner, best_in_flight
from gulliver.serve.ranks._stage import StageModel
from gulliver.serve.ranks._worker import RankMessage, work

__all__ = [
    "Layout",
    "RankMessage",
    "RankPlace",
    "RanksRunner",
    "StageModel",
    "best_in_flight",
    "plan_ranks",
    "start_ranks",
    "work",
]

"""The engine's model over several processes: layers cut over tensor ranks, dealt to stages.

    runner = start_ranks(folder, Ways(tensor=2, pipeline=2), sequences=64, step_tokens=512)

Read `_layout.py` (who has what), `_stage.py` (one rank's part of the model over its pages),
`_worker.py` (commands in, carries and logits out), `_runner.py` (the controller) and
`_processes.py` (starting and ending the ranks).

What it does not know: requests, tokens' meaning, sockets other than its own.
"""

from gulliver.serve.ranks._layout import Layout, Place, plan_ranks
from gulliver.serve.ranks._processes import start_ranks
from gulliver.serve.ranks._runner import RanksRunner, depth_of
from gulliver.serve.ranks._stage import StageModel
from gulliver.serve.ranks._worker import Told, work

__all__ = [
    "Layout",
    "Place",
    "RanksRunner",
    "StageModel",
    "Told",
    "depth_of",
    "plan_ranks",
    "start_ranks",
    "work",
]

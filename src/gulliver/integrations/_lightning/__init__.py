"""Strategies of Lightning, for whichever name its package is installed under.

Read `_strategy.py` first: what happens in a fit stands there. `_options.py` turns arguments into a
plugin, `_optimizer.py` is what Lightning sees of a boosted optimizer, `_checkpoints.py` the two
forms of a checkpoint, `_unmoved.py` refuses modules that move what is sharded. None of them imports
Lightning: ``gulliver.integrations.lightning`` and ``.pytorch_lightning`` bring the classes that
they are put on.
"""

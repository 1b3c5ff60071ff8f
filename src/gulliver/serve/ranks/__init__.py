"""The engine's model on several processes: tensor ranks within pipeline stages.

Example::

    runner = start_ranks(folder, ModelOptions(tensor=2, pipeline=2), sequences=64)
"""

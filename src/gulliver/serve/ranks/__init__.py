"""The engine's model on several processes: tensor ranks within pipeline stages.

Example::

    runner = start_ranks(folder, ModelOptions(tp_size=2, pp_size=2), sequences=64)
"""

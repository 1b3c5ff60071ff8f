"""Hybrid parallelism: tensor, sequence and pipeline axes over one model.

`steps` shards a model in place, `checks` rejects unsupported models, and `mesh` creates the rank
groups.
"""

"""Hybrid parallelism: tensor, sequence and pipeline axes over one model.

Start with `steps`, which shards a model in place; `checks` rejects unsupported models, and `mesh`
has the rank groups.
"""

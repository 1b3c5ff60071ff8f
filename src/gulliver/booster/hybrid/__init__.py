"""Hybrid parallelism: tensor, sequence and pipeline axes over one model.

Read `steps`, which cuts a model in place; `checks` rejects what cannot be cut, and `mesh` has the
rank groups.
"""

"""Integrations with Accelerate, Lightning and the transformers Trainer.

This package does not import its modules; import the one to use.
"""

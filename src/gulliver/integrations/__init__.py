"""Integrations with Accelerate, Lightning and the transformers Trainer.

Each module is imported on use, none by this package.
"""

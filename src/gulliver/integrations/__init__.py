"""Gulliver inside the frameworks that people use.

Each module is imported on use, none by this package.
"""

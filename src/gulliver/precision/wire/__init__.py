"""Formats in which numbers travel between ranks."""

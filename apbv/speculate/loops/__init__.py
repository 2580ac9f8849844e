"""Loops that decode: without a draft, in turns, beside a draft host, in batches."""

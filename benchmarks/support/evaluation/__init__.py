"""Asks a model the questions of a benchmark, and scores its answers."""

"""Trains the demo's target and its draft."""

"""This package trains the demo's target and its draft."""

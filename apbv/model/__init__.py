"""Loads an unmodified transformers model, takes it apart, and plugs in apbv's attention."""

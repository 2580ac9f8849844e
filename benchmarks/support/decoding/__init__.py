"""Measures decoding over long KV."""

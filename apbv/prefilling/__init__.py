"""Prefill: from a prompt to its KV, in one forward pass shared by all hosts."""

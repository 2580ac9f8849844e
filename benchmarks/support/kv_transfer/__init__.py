"""Fetches KV in a process of its own."""

"""Caches KV: it shards, gathers, selects, saves and loads keys and values."""

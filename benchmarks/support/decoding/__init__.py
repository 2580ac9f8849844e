"""This package measures decoding over long KV."""

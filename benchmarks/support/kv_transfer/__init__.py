"""This package fetches KV in a process of its own."""

"""Decoding: from the KV of a prompt to the tokens of an answer."""

"""This package decodes: it turns the KV of a prompt into the tokens of an answer."""

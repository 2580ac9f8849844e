"""From the KV of a prompt to the tokens of an answer, one or a few at a time."""

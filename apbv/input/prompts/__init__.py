"""From a question to the inputs of a model: text, tokens, positions, and what is encoded."""

"""From a prompt to its KV, in one forward pass that all hosts share."""

"""What drafts: a model, the target itself, or text; chains and trees."""

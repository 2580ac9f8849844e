"""The drafting strategies, and how each chooses what its draft sees."""

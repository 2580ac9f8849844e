"""This package plans: it says from a model's config alone whether a prompt will fit in memory."""

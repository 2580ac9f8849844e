"""This package makes video clips, and measures how they are read."""

"""Makes video clips, and measures how they are read."""

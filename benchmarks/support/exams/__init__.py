"""Asks the demo model about held-out clips, and counts its right answers."""

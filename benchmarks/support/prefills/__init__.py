"""Runs prefills, and reports how long they took."""

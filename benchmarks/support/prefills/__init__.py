"""This package runs prefills, and reports how long they took."""

"""The cases that operators are measured on, and how they are checked and timed."""

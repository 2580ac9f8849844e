"""Compares ways to read a long video: which they are, their answers, and a report of these."""

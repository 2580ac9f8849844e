"""Turning a question and its sources into what a model reads."""

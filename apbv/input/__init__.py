"""Turns a question and its sources into model inputs."""

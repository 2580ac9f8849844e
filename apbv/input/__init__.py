"""From a question and its sources to what a model reads."""

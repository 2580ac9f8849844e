"""This package counts what a prefill costs, and predicts its time; nothing runs."""

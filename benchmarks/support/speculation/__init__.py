"""What speculative decoding is compared in, and reports how fast it was."""

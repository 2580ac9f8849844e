"""Command-line entry points. Run by path under torchrun; installed as ``apbv.launch``."""

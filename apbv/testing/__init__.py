"""Tests of programs that use apbv: no checkpoint, no video file, and no process per host is needed.

- :mod:`.simulated` runs several hosts in one process, on virtual clocks.
- :mod:`.random_models` makes models with random weights, and prompts for them.
- :mod:`.clips` draws videos from seeds, with questions about them that have one answer.

The tests and benchmarks of apbv use these modules, too. They need no test framework.
"""

"""The doctor finds out what of apbv works on a machine, how fast, and why the rest does not.

A *part* (``machine.py``, ``backends.py``, ...) is a list of checks, the same on every host. :mod:`.examination`
runs them one after the other, and :mod:`.page` writes down what they found.
"""

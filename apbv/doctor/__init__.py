"""Checks which parts of apbv work on a machine, and why the others do not.

A *part* is a list of checks, the same on every host: of the machine (``machine.py``), of backends
and operators (``kernels.py``), of exchanges and answers (``hosts.py``). :mod:`.examination` runs
them one after the other, and writes down what they found.
"""

"""The parts of the benchmarks, the scripts in the folder above; no script imports another.

In the package itself stands what scripts about different subjects share; its folders are about one
subject each.
"""

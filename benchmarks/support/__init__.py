"""This package is what the benchmarks, the scripts in the folder above, are made of; no script imports another.

In the package itself stands what scripts about different subjects share; its folders are about one subject each.
"""

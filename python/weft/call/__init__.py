"""A call between the API and the native module: options and tensors checked, plans, both engines, gradients, operators.

Inner modules: nothing outside of weft's root imports them but tests and benchmarks.
"""

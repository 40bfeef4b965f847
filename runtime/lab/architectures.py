"""Kinds of GPUs that there are kernels for, by compute capability."""

LEAST_CAPABILITY = (8, 0)  # below it there are no products of BF16
COMPILED = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))  # kernels are compiled for these in tests

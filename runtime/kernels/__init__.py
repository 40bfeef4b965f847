"""Triton kernels, one op per file, each beside its plain torch reference."""

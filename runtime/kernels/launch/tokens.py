"""Token thresholds: how many tokens make a step few or many, for whoever computes something of it.

A step of up to EXACT_TOKENS tokens promises each the bits that it has in a step of its own. All
other numbers here are speed alone, measured on an H200 (LOG.md) but for the CPU's.
"""

EXACT_TOKENS = 16  # of a step: each has the bits of one that is alone; more of a prompt are a chunk

# Linear layers in packed codes.
HALVED_TOKENS = 4  # that share the columns of one product by two
GEMV_TOKENS = 32  # of one launch, which reads the weight once
PACKED_TOKENS = 128  # multiplied by GEMVs; more by cuBLAS, from weights widened to BF16
SHORT_TOKENS = 1024  # of a prompt for which weights are widened in larger blocks

# Linear layers in BF16, and such rows beside packed ones.
DENSE_TOKENS = 16  # multiplied by GEMVs, in one launch; more by cuBLAS

# Experts.
EXPERTS_TOKENS = 64  # computed one by one; more are grouped by expert
EXPERTS_CHUNK = 1024  # grouped by expert in one launch

# Attention.
PROMPT_TOKENS = 128  # of a chunk that an own kernel attends to; more are PyTorch's

# The CPU.
CPU_PACKED_TOKENS = 80  # times planes of 4 bits: multiplied in codes; more by dequantized weights

"""Token thresholds: how many tokens make a step few or many, wherever something depends on it.

Measured on an H200 (LOG.md), but for the CPU's.
"""

# A step of so many tokens gives each the bits that it has in a step of its own, in every way of
# computing; more tokens only take ways that are faster.
EXACT_TOKENS = 64
STEP_TOKENS = 256  # of a decode step, one of each sequence; more than EXACT_TOKENS in parts
SEQUENCE_TOKENS = 16  # of one sequence in a decode step; more of a prompt are attended to together
PACK_SEQUENCES = 16  # whose chunks of prompts pass the layers together, see `engine.packs`
ROUND_TOKENS = 64  # of a round: last tokens and drafts of all its sequences
ROUND_SEQUENCES = 16  # of a round; beside more, a check costs more than drafts bring
STATES_TOKENS = 16  # of a round for which slots are kept, one for the state after each draft

# Linear layers in packed codes.
HALVED_TOKENS = 4  # that share the columns of one product by two
GEMV_TOKENS = 32  # of one launch, which reads the weight once
INT8_GEMV_TOKENS = 8  # of one launch of x in eight bits: the columns of a product
WGMMA_TOKENS = 64  # of one launch of wgmma on Hopper
PACKED_TOKENS = 64  # multiplied by GEMVs; more by weights widened to BF16
SHORT_TOKENS = 1152  # of a prompt for which weights are widened in larger blocks

# Linear layers in BF16, and such rows beside packed ones.
DENSE_TOKENS = 64  # multiplied by GEMVs; more by cuBLAS, but for few rows (gates, routers)
ROWS_TOKENS = 16  # whose dense rows are multiplied in the launch of the packed ones

# Experts.
EXPERTS_APART = 12  # that read their experts each for itself; more read one for several tokens
EXPERTS_TOKENS = 64  # with the bits of a lone one; more are grouped by expert, in BF16
EXPERTS_CHUNK = 1024  # grouped by expert in one launch

# Attention.
PROMPT_TOKENS = 128  # of a chunk that small programs attend to; see `prompt_launch`

# Processes that share a model.
MOST_RANKS = 16

# The CPU.
CPU_PACKED_TOKENS = 80  # times planes of 4 bits: multiplied in codes; more by widened weights

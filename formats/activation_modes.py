"""Names of the ways in which packed linears take their inputs, for options, without torch.

`exact` takes them as they are, `int8` rounds them to eight bits: see `formats.activations`. A head
takes 16 bits where others take eight, on a GPU; on a CPU it takes them as they are.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Activations = Literal["exact", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

Inputs = Literal["exact", "int8", "int16"]  # of one linear
HEAD_INPUTS: Mapping[Activations, Inputs] = {"exact": "exact", "int8": "int16"}

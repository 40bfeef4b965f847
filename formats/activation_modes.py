"""Names of the ways in which packed linears take their inputs, for options, without torch.

`exact` takes them as they are, `int8` rounds them to eight bits: see `formats.activations`.
"""

from typing import Literal, get_args

Activations = Literal["exact", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

"""Names of the ways in which packed linears take their inputs, for options, without torch.

`exact` takes them as they are, `int8` rounds them to eight bits: see `formats.activations`. A head
takes 16 bits where others take eight, on a GPU; on a CPU it takes them as they are. A linear behind
a norm takes eight bits with one scale a token (`whole`) where hidden states are rotated.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Activations = Literal["exact", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

Inputs = Literal["exact", "int8", "whole", "int16"]  # of one linear
HEAD_INPUTS: Mapping[Activations, Inputs] = {"exact": "exact", "int8": "int16"}


def inputs_of(activations: Activations, head: bool, normed: bool, rotated: bool) -> Inputs:
    """Way in which a packed linear takes its inputs.

    Args:
        head: its outputs are logits.
        normed: it stands behind a norm, with nothing between.
        rotated: the model's hidden states are in a basis in which they are much alike.
    """
    if head:
        return HEAD_INPUTS[activations]
    return "whole" if activations == "int8" and normed and rotated else activations

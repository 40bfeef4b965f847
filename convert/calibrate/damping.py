"""The damping of second moments, chosen by the error on windows held out.

What GPTQ gains is learned from the correlations of the inputs. Those of a short text are partly
chance: codes that exploit them are better on that text and worse on any other. A larger diagonal
trusts the correlations less. A layer's own error would often choose less than the first; the whole
model's KL does not: on 75 k tokens 0.01, the GPTQ paper's value, gave .143 where 0.3 gives .078
(Qwen2.5-Coder-0.5B), and .118 against .100 (SmolLM2-135M).
"""

from torch import Tensor

from lowbit.convert.calibrate.gptq import Factor, factorize
from lowbit.convert.calibrate.linear import compensated
from lowbit.convert.calibrate.moments import Moments
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import Scheme

DAMPINGS = (0.3, 1.0, 3.0)  # shares of the mean diagonal
ROWS = 128  # of the linears, evenly spread, that each is tried on


def choose_damping(
    w: Tensor, scheme: Scheme, rule: ScaleRule, moments: Moments, held: Moments | None
) -> Factor:
    """The factor of the moments whose damping gives the least error on the windows held out.

    Dampings are tried from the smallest on, until the error grows.

    Args:
        w: [N, K] float32, weights of linears that read the input.
        scheme: of the first of them.
        rule: how scales are searched.
        moments: of the windows to learn from.
        held: of those held out; None for the smallest damping.

    Raises:
        QuantizationError: the moments are not positive definite.
    """
    best = factorize(moments.damped(DAMPINGS[0]))
    if held is None:
        return best
    rows = w[:: -(-len(w) // ROWS)]

    def error(factor: Factor) -> float:
        found = compensated(rows, scheme, rule, moments, factor)[1]
        return held.error(rows, found.weight)

    least = error(best)
    for damping in DAMPINGS[1:]:
        factor = factorize(moments.damped(damping))
        if (found := error(factor)) >= least:
            break
        best, least = factor, found
    return best

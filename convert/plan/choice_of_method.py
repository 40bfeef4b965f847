"""The method that `--method auto` stands for, and what the next better one brings.

All limits and claims about methods are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowbit.convert.plan.calibration_cost import CORE_RATE
from lowbit.convert.plan.method import RTN, Method
from lowbit.formats.architectures.names import MTP_PREFIX
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import Scheme

WEIGHTED, GPTQ, ROTATED = Method("weighted"), Method("gptq"), Method("gptq", rotate=True)
WITH_EXPERTS = (RTN, WEIGHTED, GPTQ)  # methods for mixtures of experts, best last
ROTATION_MEASURED = ("llama", "qwen2", "qwen3")  # model types; others only where it is asked for
LONGEST_SECONDS = 15 * 60.0  # that gptq may take on a CPU without being asked for
# Bits from which on round-to-nearest loses next to nothing: KL 0.0005 and less at 8.
PLENTY_OF_BITS = 8


@dataclass(frozen=True, slots=True)
class Gain:
    """The step from one method to the next better one."""

    method: Method  # the better one
    words: str  # what it brings


# Mean KL on WikiText at INT4 of SmolLM2-135M in groups of 64, Qwen2.5-Coder-0.5B and -1.5B in
# groups of 128 (quantize/LOG.md):
#     rtn .427 .219 .145, weighted .243 .161 .097, gptq .114 .064 .058,
#     gptq+autoround .105 .053 .050, gptq after a random rotation .110 .042 .049
# After a rotation autoround is measured on SmolLM2-135M alone: .103 to .095, with an INT8 head.
TO_WEIGHTED = "the loss typically a third lower"
TO_GPTQ = "the loss typically halved"
RTN_TO_GPTQ = "the loss typically a third of it"
TO_ROTATED = "the loss typically a sixth lower"
TO_AUTOROUND = "the loss typically a tenth lower"
# Bits chosen at the bytes of INT4 with an INT8 head, gptq+rotate: .103 to .073, .042 to .018.
TO_CHOSEN_BITS = "the loss typically a third lower"


def best_gptq(rotatable: bool) -> Method:
    """The method that `auto` takes where there is time: gptq, rotated where that is possible."""
    return replace(GPTQ, rotate=rotatable)


def unmeasured_rotation(model_type: str) -> str | None:
    """Reason why `auto` does not rotate models of a type; None where it does."""
    if model_type in ROTATION_MEASURED:
        return None
    return f"the gain is not measured for {model_type}; --method {ROTATED} does it"


def methods(rotatable: bool, experts: bool = False) -> tuple[Method, ...]:
    """The methods that estimates are shown for, best last.

    Args:
        rotatable: the checkpoint can be rotated, and gains by it.
    """
    if experts:
        return WITH_EXPERTS
    best = best_gptq(rotatable)
    return RTN, WEIGHTED, best, replace(best, autoround=True)


def gain_of(method: Method, rotatable: bool, experts: bool = False) -> Gain | None:
    """The step to a better method; None where none is measured.

    Args:
        rotatable: the checkpoint can be rotated, and gains by it.
    """
    best = best_gptq(rotatable)
    learned = Gain(replace(GPTQ, autoround=True), TO_AUTOROUND)
    steps = {
        RTN: Gain(WEIGHTED, TO_WEIGHTED),
        WEIGHTED: Gain(best, TO_GPTQ),
        GPTQ: Gain(best, TO_ROTATED) if rotatable else learned,
    }
    step = steps.get(method)
    return None if step is None or (experts and step.method not in WITH_EXPERTS) else step


def automatic_method(
    schemes: Mapping[str, Scheme | None],
    device: str,
    gptq_operations: float,
    cores: int,
    rotatable: bool,
    experts: bool = False,
) -> Method:
    """The method that `auto` stands for: the same for the same model, text and machine.

    Args:
        rotatable: the checkpoint can be rotated, and gains by it.
    """
    if needs_no_calibration(schemes):
        return RTN
    fast = device == "cuda" or gptq_operations <= LONGEST_SECONDS * CORE_RATE * cores
    method = best_gptq(rotatable) if fast else WEIGHTED
    return WITH_EXPERTS[-1] if experts and method not in WITH_EXPERTS else method


def check_method(method: Method, experts: bool, drafter: bool = False) -> None:
    """Refuse a method that mixtures of experts, or drafters, do not have.

    Raises:
        QuantizationError: naming those that they have.
    """
    if drafter and method.calibrated:
        raise QuantizationError(
            f"method `{method}` is not implemented for drafters: no text passes through one "
            "without its target",
            hint="leave out --method, or give rtn or absmax",
        )
    if experts and method.calibrated and method not in (*WITH_EXPERTS, ROTATED):
        raise QuantizationError(
            f"method `{method}` is not implemented for mixtures of experts",
            hint=f"implemented: {', '.join(map(str, (*WITH_EXPERTS, ROTATED)))}",
        )


def needs_no_calibration(schemes: Mapping[str, Scheme | None]) -> bool:
    """Tell whether every linear has so many bits that calibration has nothing to gain.

    Those of multi-token prediction, which no text calibrates, do not count.
    """
    return all(
        scheme is None or scheme.bits >= PLENTY_OF_BITS
        for module, scheme in schemes.items()
        if not module.startswith(MTP_PREFIX)
    )

"""Methods that `--method` names: the choice of codes, and training after it."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import ScaleRule

Codes = Literal["rtn", "absmax", "weighted", "gptq"]


@dataclass(frozen=True, slots=True)
class Method:
    """Steps in the order in which they are taken."""

    # Round-to-nearest with searched scales, with scales of |w|max, with scales weighted by the
    # inputs' power, or codes that make up for one another's errors.
    codes: Codes = "rtn"
    rotate: bool = False  # True where the residual stream is rotated before; gptq alone gains by it
    autoround: bool = False  # True where rounding and scales are then learned, layer by layer

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Read `gptq`, `gptq+rotate`, `weighted+autoround`, ...

        Raises:
            QuantizationError: an unknown step, or steps that do not follow one another.
        """
        known = METHODS.get("autoround" if text == "rtn+autoround" else text)
        if known is None:
            raise QuantizationError(
                f"method `{text}` is not known",
                hint="auto, absmax, rtn, weighted or gptq; the last three may be followed by "
                "+autoround, gptq by +rotate before it, as in gptq+rotate",
            )
        return known

    @property
    def from_original(self) -> bool:
        """True where the original's states alone decide: weighted scales, which need one pass."""
        return self.codes == "weighted" and not self.autoround

    @property
    def calibrated(self) -> bool:
        """Tell whether it needs a text."""
        return self not in (RTN, ABSMAX)

    @property
    def unrotated(self) -> "Method":
        """The method less its rotation."""
        return replace(self, rotate=False)

    def scale_rule(self, positive: bool = False) -> ScaleRule:
        """The choice of scales; `positive` asks for positive ones alone."""
        if self.codes == "absmax":
            return "absmax"
        return "positive" if positive else "signed"

    def __str__(self) -> str:
        """Text that `parse` reads; `rtn` is left out before other steps."""
        learned = [name for name in ("rotate", "autoround") if getattr(self, name)]
        first = [] if self.codes == "rtn" and learned else [self.codes]
        return "+".join([*first, *learned])


RTN, ABSMAX = Method(), Method("absmax")
METHODS = {str(ABSMAX): ABSMAX} | {
    str(method): method
    for codes in get_args(Codes)
    if codes != "absmax"
    for rotate in ((False, True) if codes == "gptq" else (False,))
    for method in (Method(codes, rotate), Method(codes, rotate, autoround=True))
}

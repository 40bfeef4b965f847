"""Mean square of every linear's input channels, measured by the original model over a text.

The search of scales weights the error of a column by it. One prompt of at most MOST_TOKENS tokens
runs through the dense model once; each weight is read when it is used and dropped after, so that
memory holds one of them at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Inputs
from lowbit.formats.architectures.names import expert_of
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.rtn import SEARCHED_BITS
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_linear import WatchedLinear
from lowbit.runtime.models.loader import OpenedModel, build_decoder
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.weights.linear import Linear
from lowbit.runtime.weights.weights import Weights

TEXTS = ("simplewiki-4kB.txt", "gsm8k-train-2kB.txt", "python-stdlib-2kB.txt")
MOST_TOKENS = 2048
FEWEST_TOKENS = 64  # of an expert; the scales of one that saw fewer are searched unweighted


def check_searched(opened: OpenedModel) -> None:
    """Refuse a recipe whose scales the power of the inputs does not change.

    Raises:
        QuantizationError: no linear has few enough bits.
    """
    if not any(scheme and scheme.bits in SEARCHED_BITS for scheme in opened.schemes.values()):
        raise QuantizationError(
            f"method `weighted` changes nothing: scales of {SEARCHED_BITS.stop} bits are not "
            "searched",
            hint="leave out --method",
        )


def calibration_ids(tokenizer: Tokenizer, opened: OpenedModel) -> list[int]:
    """Tokens of the bundled text, as many as the model has positions for."""
    data = Path(__file__).with_name("data")
    text = "\n\n".join((data / name).read_text("utf-8") for name in TEXTS)
    ids = tokenizer.encode(text, framed=True)
    return ids[: min(MOST_TOKENS, opened.config.max_position_embeddings)]


@torch.inference_mode()
def input_power(
    opened: OpenedModel, ids: list[int], device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Mean square of each input channel of every linear but the head, over a text.

    Returns:
        [K] float32 on the device, by module; none for experts with fewer than FEWEST_TOKENS.

    Raises:
        QuantizationError: an input is NaN or infinite.
    """
    weights = _WatchedWeights(opened.checkpoint, opened.schemes, device, dtype, _never_read)
    decoder = build_decoder(opened, weights, cpu, len(ids))
    step = lone_step(len(ids), device)
    state = new_state(opened.config, 1 + pages_for(len(ids)), 2, dtype, device)
    decoder.hidden(torch.tensor(ids, device=device), state, step)
    weights.check_finite()
    for module, power in weights.power.items():
        if not bool(power.isfinite().all()):
            raise QuantizationError(
                f"the input of `{module}` is NaN or infinite on the calibration text",
                hint="the checkpoint is damaged; or leave out --method weighted",
            )
    return weights.power


@dataclass(frozen=True, slots=True)
class _WatchedWeights(Weights[WatchedLinear]):
    """Weights whose linears are read at each use."""

    power: dict[str, Tensor] = field(default_factory=dict)

    def linear(
        self, *modules: str, paired: bool = False, head: bool = False, normed: bool = False
    ) -> WatchedLinear:
        """Rows of several modules, in the given order."""
        return WatchedLinear(partial(self.dense_rows, modules), modules, self.power)

    def stack(
        self, experts: Sequence[Sequence[str]], paired: bool = False
    ) -> Sequence[WatchedLinear]:
        """Linears of experts; all but the shared one count from FEWEST_TOKENS tokens on."""
        linears = [self.linear(*modules, paired=paired) for modules in experts]
        return tuple(
            linear if expert_of(linear.modules[0]) is None else replace(linear, least=FEWEST_TOKENS)
            for linear in linears
        )


def _never_read(w: Linear, paired: bool, inputs: Inputs) -> WatchedLinear:
    """A tied head, whose input is not asked for."""
    return WatchedLinear(w.dequantized, (), {})

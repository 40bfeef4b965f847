"""A calibration as part of a conversion: what identifies it, and its run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lowbit.convert.calibrate.calibrate import Progress, Task, calibrate
from lowbit.convert.calibrate.held_out import shuffled
from lowbit.convert.calibrate.request import on_record
from lowbit.convert.calibrate.store import Calibrated, Store
from lowbit.convert.original.calibration_text import CalibrationText
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.plan import Plan
from lowbit.formats.layout.manifest import Calibration


@dataclass(frozen=True, slots=True)
class Session:
    """A calibration that can be begun, or taken up again.

    Attributes:
        plan: of the conversion.
        source: folder of the original.
        text: what to calibrate on.
        device: where to compute.
        record: what lowbit.json says of it.
    """

    plan: Plan
    source: Path
    text: CalibrationText
    device: torch.device
    record: Calibration

    @property
    def digest(self) -> str:
        """Identifies the plan, the text and the machine: equal in a resumed run."""
        content = [self.plan.digest(), asdict(self.record)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def run(self, folder: Path, progress: Progress) -> Calibrated:
        """Choose all codes, keeping finished layers in `folder`.

        Raises:
            LowbitError: the source cannot be read or calibrated.
        """
        store = Store(folder, self.digest)
        weights = open_weights(self.source)
        if self.plan.recipe.method.rotate:
            weights = weights.rotated()
        with without_advice():
            model = load_layered_model(weights, self.text.samples.shape[1], self.device)
            task = Task(
                self.plan.recipe.method,
                self.plan.recipe.rule,
                {module: scheme for module, scheme in self.plan.schemes.items() if scheme},
            )
            return calibrate(model, shuffled(self.text.samples), task, store, self.device, progress)


def begin(plan: Plan, source: Path, text: CalibrationText, device: torch.device) -> Session:
    """A calibration of a plan's linears."""
    return Session(plan, source, text, device, on_record(text, device))

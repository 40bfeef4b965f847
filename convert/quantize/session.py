"""A calibration as part of a conversion: what a user asks for, what identifies it, and its run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.progress import Note, Progress, unsaid
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import Weights
from lowbit.convert.plan.calibration_cost import Windows, shapes_of
from lowbit.convert.plan.calibration_memory import calibration_memory, check_calibration
from lowbit.convert.plan.memory import Memory
from lowbit.convert.plan.plan import Plan
from lowbit.convert.quantize.calibrate import calibrate
from lowbit.convert.quantize.store import Calibrated, Finished, Store, ignored
from lowbit.convert.quantize.windows import shuffled
from lowbit.convert.texts.calibration import CalibrationText, read_calibration
from lowbit.formats.layout.manifest import Calibration
from lowbit.formats.safetensors.checkpoint import Checkpoint

SAMPLES = {"cpu": 64, "cuda": 256}  # windows where nothing is said, by kind of device
LENGTH = 512


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The text to calibrate on."""

    file: Path | None = None  # .txt or .jsonl; the bundled mix where left out
    # Windows at most; as many as the device handles in minutes where left out.
    samples: int | None = None
    length: int = LENGTH  # tokens of a window at most
    chat: bool = False  # whether to apply the model's chat template

    def read(self, source: Path, device: torch.device) -> CalibrationText:
        """The text as windows of token ids.

        Raises:
            LowbitError: a text that cannot be read, or is too short.
        """
        return read_calibration(
            self.file,
            source,
            length=self.length,
            limit=self.samples or SAMPLES[device.type],
            chat=self.chat,
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A calibration that can be begun, or taken up again."""

    plan: Plan
    source: Checkpoint  # the original
    text: CalibrationText  # what to calibrate on
    device: torch.device

    @property
    def record(self) -> Calibration:
        """The record of the calibration in lowbit.json."""
        samples, length = self.text.samples.shape
        text = self.text
        return record_of(text.name, text.sha256, samples, length, text.chat, self.device)

    @property
    def digest(self) -> str:
        """Identifies the plan, the tokens and the machine: equal in a resumed run."""
        tokens = hashlib.sha256(self.text.samples.contiguous().numpy().data).hexdigest()
        content = [self.plan.digest(), asdict(self.record), tokens]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def memory(self) -> Memory:
        """Peak memory of the calibration."""
        shapes = shapes_of(self.source.config, self.plan.schemes, self.source.tensors)
        method, device = self.plan.method, self.device.type
        windows = Windows(*self.text.samples.shape)
        return calibration_memory(shapes, method, windows, device, torch.get_num_threads())

    def check_memory(self) -> None:
        """Refuse a calibration that does not fit.

        Raises:
            ResourceError: it takes more memory than is free.
        """
        check_calibration(self.memory(), Windows(*self.text.samples.shape), self.device.type)

    def run(
        self,
        folder: Path,
        progress: Progress,
        note: Note = unsaid,
        on_finished: Finished = ignored,
    ) -> Calibrated:
        """Choose all codes, keeping finished layers in `folder`.

        Args:
            folder: where the conversion is built.
            note: told of layers that an earlier run kept and that are not used.
            on_finished: given each layer, and the head, when its file is there, in some thread;
                what it raises ends the calibration.

        Raises:
            LowbitError: the source cannot be read or calibrated.
        """
        store = Store(folder, note, on_finished)
        weights = Weights(self.source, None)
        if self.plan.method.rotate:
            weights = weights.rotated()
        with without_advice():
            model = load_layered_model(weights, self.text.samples.shape[1], self.device)
            samples = shuffled(self.text.samples)
            return calibrate(model, samples, self.plan, store, self.digest, self.device, progress)


def record_of(
    text: str, sha256: str, samples: int, length: int, chat: bool, device: torch.device
) -> Calibration:
    """The record of a calibration on this machine; see `Calibration` for the arguments."""
    on_cpu = device.type == "cpu"
    return Calibration(
        text=text,
        text_sha256=sha256,
        samples=samples,
        length=length,
        chat=chat,
        device="cpu" if on_cpu else torch.cuda.get_device_name(device),
        threads=torch.get_num_threads() if on_cpu else 0,
        torch_version=torch.__version__,
        transformers_version=version("transformers"),
    )

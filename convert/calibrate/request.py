"""The calibration that a user asks for, and its record in lowbit.json."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.convert.original.calibration_text import CalibrationText, read_calibration
from lowbit.formats.layout.manifest import Calibration

SAMPLES = {"cpu": 64, "cuda": 256}  # windows where nothing is said, by kind of device
LENGTH = 512


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The text to calibrate on.

    Attributes:
        file: .txt or .jsonl; the bundled mix where left out.
        samples: windows at most; as many as the device handles in minutes where left out.
        length: tokens of a window at most.
        chat: whether to apply the model's chat template.
    """

    file: Path | None = None
    samples: int | None = None
    length: int = LENGTH
    chat: bool = False

    def read(self, source: Path, device: torch.device) -> CalibrationText:
        """The text as windows of token ids.

        Args:
            source: folder of the original.
            device: where the calibration is computed.

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


def on_record(text: CalibrationText, device: torch.device) -> Calibration:
    """The record of a calibration in lowbit.json."""
    import transformers

    on_cpu = device.type == "cpu"
    samples, length = text.samples.shape
    return Calibration(
        text=text.name,
        text_sha256=text.sha256,
        samples=samples,
        length=length,
        chat=text.chat,
        device="cpu" if on_cpu else torch.cuda.get_device_name(device),
        threads=torch.get_num_threads() if on_cpu else 0,
        torch_version=torch.__version__,
        transformers_version=str(transformers.__version__),
    )

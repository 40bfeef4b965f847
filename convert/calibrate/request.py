"""What a user asks of a calibration, and what of it goes on record."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.convert.original.calibration_text import CalibrationText, read_calibration
from lowbit.formats.layout.manifest import Calibration

SAMPLES = 256
LENGTH = 512


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """The text to calibrate on.

    Attributes:
        file: .txt or .jsonl; the bundled mix where left out.
        samples: windows at most.
        length: tokens of a window at most.
        chat: whether to apply the model's chat template.
    """

    file: Path | None = None
    samples: int = SAMPLES
    length: int = LENGTH
    chat: bool = False

    def read(self, source: Path) -> CalibrationText:
        """The text as windows of token ids.

        Raises:
            LowbitError: a text that cannot be read, or is too short.
        """
        return read_calibration(
            self.file, source, length=self.length, limit=self.samples, chat=self.chat
        )


def on_record(text: CalibrationText, device: torch.device) -> Calibration:
    """What lowbit.json says of a calibration."""
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

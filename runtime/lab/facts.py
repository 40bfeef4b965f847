"""Versions and hardware that figures depend on, without paths and names of this machine."""

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from lowbit.formats.machine.cores import core_count
from lowbit.runtime.lab.checks import driver_version

if TYPE_CHECKING:
    from lowbit.runtime.kernels.launch.tuned import Launches

CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit")
SMI_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of a GPU in MHz, and the power that it may take in watts."""

    now_mhz: float  # of the multiprocessors, right after the measurement
    most_mhz: float  # of the multiprocessors
    memory_mhz: float  # most of the memory
    power_limit_w: float  # of the board


@dataclass(frozen=True, slots=True)
class TunedFor:
    """Launches that models load with."""

    file: str  # name of the file that keeps them
    date: str  # on which they were measured
    linears: int  # sizes of linears that have some


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU."""

    name: str  # of the card
    capability: str  # `9.0`
    memory_bytes: int  # of the card
    multiprocessors: int  # of the card
    driver: str | None  # its version; None where the system does not name it
    clocks: Clocks | None  # None where nvidia-smi does not tell
    kernels: str  # version of the kernels of linears
    launches: TunedFor | None  # None for those of the bundled tables


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Software and hardware."""

    lowbit: str  # version, as those that follow
    python: str
    torch: str
    cuda: str | None  # that PyTorch is built for; None for CPUs
    triton: str | None  # None where it is not installed
    system: str  # `Linux x86_64`
    cores: int  # that this process may use
    gpu: GpuFacts | None  # None where none was measured


def machine_facts(device: str) -> MachineFacts:
    """Facts about this machine.

    Args:
        device: that was measured, `cpu` or `cuda`.

    Raises:
        FormatError: damaged launches of `lowbit-run tune`.
    """
    return MachineFacts(
        lowbit=version("lowbit"),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=_version("triton"),
        system=f"{platform.system()} {platform.machine()}",
        cores=core_count(),
        gpu=None if device == "cpu" else _gpu(),
    )


def measurement_facts(quantized_at_load: str | None, device: str) -> dict[str, Any]:
    """Fields of every measurement: recipe of the weights, kind of the prompt, and the machine."""
    return {
        "quantized_at_load": quantized_at_load,
        "prompt": "arbitrary tokens",
        "machine": asdict(machine_facts(device)),
    }


def _gpu() -> GpuFacts:
    from lowbit.runtime.kernels.launch.tuned import card_here, path_for, read_launches

    card = card_here()
    about = torch.cuda.get_device_properties()
    found: Launches | None = read_launches(card)
    tuned = None
    if found is not None:
        tuned = TunedFor(path_for(card).name, found.date, len(found.linears))
    return GpuFacts(
        name=card.name,
        capability=f"{card.capability // 10}.{card.capability % 10}",
        memory_bytes=about.total_memory,
        multiprocessors=about.multi_processor_count,
        driver=driver_version(),
        clocks=_clocks(str(getattr(about, "uuid", ""))),
        kernels=card.kernels,
        launches=tuned,
    )


def _clocks(uuid: str) -> Clocks | None:
    """Clocks of the card with this UUID; None where nvidia-smi does not tell all of them."""
    program = shutil.which("nvidia-smi")
    if program is None or not uuid:
        return None
    command = [program, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, "-i", f"GPU-{uuid.removeprefix('GPU-')}"],
            capture_output=True,
            text=True,
            timeout=SMI_SECONDS,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        now, most, memory, power = map(float, done.stdout.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):  # not a number: [N/A]
        return None
    return Clocks(now, most, memory, power)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

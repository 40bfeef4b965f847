"""Checks of this machine: libraries, GPU, compiler, folders. Nothing is loaded or written."""

import importlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from lowbit.formats.errors import FormatError
from lowbit.formats.machine.cores import core_count
from lowbit.formats.machine.system import install_hint
from lowbit.runtime.kernels.launch.card import COMPILED, LEAST_CAPABILITY

State = Literal["ok", "note", "missing"]  # a note costs something, but no command
DRIVER = Path("/proc/driver/nvidia/version")
CUDA = "install PyTorch's build for CUDA: https://pytorch.org/get-started/locally names the command"
FAST_CODES = ("AVX2", "AVX512")
HUB_SECONDS = 10.0
MEASURED_CAPABILITY = (9, 0)  # of the cards that the bundled launches are for
REQUIREMENT = re.compile(r"([\w.-]+).*;.*extra == ['\"](\w+)['\"]")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str  # its name
    state: State  # `missing` if a command that was asked about cannot work without it
    found: str  # what is there
    hint: str = ""  # what to do about it; empty where nothing is to be done


def look(device: str | None, ask_hub: bool) -> list[Finding]:
    """Look at everything.

    Args:
        device: `cpu` or `cuda`; None for the GPU where one is seen.
        ask_hub: ask whether the Hub answers; nothing else touches the network.
    """
    found = [_python(), _torch()]
    if found[-1].state == "missing":
        return found
    found += [_processor(), _transformers()]
    if device != "cpu":
        gpu = list(_gpu(required=device == "cuda"))
        found += gpu
        if any(each.what == "Triton" or each.state == "missing" for each in gpu):
            found += [_compiler(), _headers(), _kernel_cache()]
    found += [_server(), _hub_cache()]
    return [*found, _hub()] if ask_hub else found


def _python() -> Finding:
    system = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("lowbit", "ok", f"{version('lowbit')}, Python {system}")


def _processor() -> Finding:
    from lowbit.formats.machine.memory import free_bytes

    free, cores = free_bytes("cpu"), core_count()
    memory = "" if free is None else f", {free / 1e9:.1f} GB of memory free"
    return Finding("processor", "ok", f"{cores} core{'s' if cores > 1 else ''}{memory}")


def _transformers() -> Finding:
    try:
        return Finding("transformers", "ok", f"{version('transformers')} (lowbit-convert)")
    except PackageNotFoundError:
        words = "not installed; lowbit-convert needs it"
        return Finding("transformers", "note", words, "pip install transformers")


def _torch() -> Finding:
    """PyTorch, which is imported to see that it can be."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        words = f"cannot be imported: {error}"
        return Finding("PyTorch", "missing", words, "https://pytorch.org/get-started/locally")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    codes = torch.backends.cpu.get_cpu_capability()
    words = f"{torch.__version__}, {built}, {codes}"
    if platform.machine() in ("x86_64", "AMD64") and codes not in FAST_CODES:
        return Finding("PyTorch", "note", words, "a processor without AVX2 decodes slowly")
    return Finding("PyTorch", "ok", words)


def _gpu(required: bool) -> Iterator[Finding]:
    """The GPUs, or why there is none; then the driver, where the system names it."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    driver = driver_version()
    if not usable:
        seen = driver is not None or shutil.which("nvidia-smi") is not None
        missing: State = "missing" if required or seen else "note"
        if torch.version.cuda is None:
            words = "none that PyTorch can use: it is built for CPUs"
            yield Finding("GPU", missing, words, CUDA if missing == "missing" else "")
        else:
            reason = f": {str(said[0].message).splitlines()[0]}" if said else ""
            hint = "nvidia-smi shows whether the driver works" if missing == "missing" else ""
            yield Finding("GPU", missing, f"none that PyTorch can use{reason}", hint)
    else:
        for index in range(torch.cuda.device_count()):
            yield _card(torch.cuda.get_device_properties(index))
        yield _triton()
        yield from _launches(torch.cuda.get_device_properties(0))
    if driver is not None:
        yield Finding("NVIDIA driver", "ok", driver)


def _card(about: "object") -> Finding:
    """A GPU: name, memory, compute capability and whether there are kernels for it."""
    name, size, capability = _facts(about)
    words = f"{name}, {size / 1e9:.0f} GB, compute capability {capability[0]}.{capability[1]}"
    if capability < LEAST_CAPABILITY:
        return Finding("GPU", "missing", f"{words}, which has no kernels", "run with --device cpu")
    if capability not in COMPILED:
        return Finding("GPU", "note", f"{words}, which no test compiles kernels for")
    return Finding("GPU", "ok", words)


def _facts(about: "object") -> tuple[str, int, tuple[int, int]]:
    """Name, bytes of memory and compute capability of a device's properties."""
    names = ("name", "total_memory", "major", "minor")
    name, size, major, minor = (getattr(about, each) for each in names)
    return str(name), int(size), (int(major), int(minor))


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where the system does not name it."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else text.split("\n")[0][:80]


def _triton() -> Finding:
    try:
        importlib.import_module("triton")
    except (ImportError, OSError) as error:
        return Finding("Triton", "missing", f"cannot be imported: {error}", "pip install triton")
    return Finding("Triton", "ok", version("triton"))


def _launches(about: "object") -> Iterator[Finding]:
    """The launches that models load with on a GPU; nothing where Triton is missing."""
    try:
        tuned = importlib.import_module("lowbit.runtime.kernels.launch.tuned")
    except (ImportError, OSError):
        return
    name, _, (major, minor) = _facts(about)
    card = tuned.MeasuredCard(name, 10 * major + minor, tuned.kernels_version())
    try:
        found = tuned.read_launches(card)
    except FormatError as error:
        yield Finding("launches", "missing", str(error), error.hint or "")
        return
    if found is not None:
        count = len(found.linears)
        words = f"measured here on {found.date} for {count} linears: {tuned.path_for(card)}"
        yield Finding("launches", "ok", words)
        return
    older = tuned.of_other_kernels(card)
    words = "of the bundled tables, measured on an H200"
    if older:
        words += f"; `{older[-1]}` is of other kernels"
    foreign = bool(older) or (major, minor) != MEASURED_CAPABILITY
    hint = "lowbit-run tune MODEL measures on this GPU" if foreign else ""
    yield Finding("launches", "note" if foreign else "ok", words, hint)


def _compiler() -> Finding:
    """The C compiler that Triton starts, found as it finds it."""
    named = os.environ.get("CC")
    found = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if found is not None:
        return Finding("C compiler", "ok", found)
    words = f"CC names `{named}`, which is no program" if named else "neither gcc nor clang"
    return Finding("C compiler", "missing", words, "apt install gcc, or set CC")


def _headers() -> Finding:
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's, as Triton does it
    path = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if path.is_file():
        return Finding("Python headers", "ok", str(path.parent))
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return Finding("Python headers", "missing", f"no `{path}`", f"apt install {package}")


def _kernel_cache() -> Finding:
    try:
        knobs = importlib.import_module("triton.knobs")
    except (ImportError, OSError):
        return Finding("kernel cache", "missing", "no Triton", "pip install triton")
    return _writable("kernel cache", Path(knobs.cache.dir), "set TRITON_CACHE_DIR to another")


def _hub_cache() -> Finding:
    from huggingface_hub import constants

    path = Path(constants.HF_HUB_CACHE)
    found = _writable("Hub cache", path, "set HF_HOME to another; folders can be run without it")
    return found if found.state == "ok" else Finding(found.what, "note", found.found, found.hint)


def _writable(what: str, folder: Path, hint: str) -> Finding:
    """Access to a folder, or to the first one above it that exists, and the space left there."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return Finding(what, "missing", f"`{there}` cannot be written to", hint)
    free = shutil.disk_usage(there).free
    return Finding(what, "ok", f"{folder}, {free / 1e9:.1f} GB free")


def _server() -> Finding:
    absent = [name for name in _of_extra("serve") if not _installed(name)]
    if not absent:
        return Finding("server", "ok", "its libraries are installed")
    found = f"not installed: {', '.join(absent)}"
    return Finding("server", "note", found, install_hint("serve"))


def _of_extra(extra: str) -> list[str]:
    """Distributions that an extra of this one asks for, on this system."""
    found = [REQUIREMENT.match(text) for text in requires("lowbit") or ()]
    names = [match[1] for match in found if match is not None and match[2] == extra]
    return [name for name in names if name != "uvloop" or sys.platform != "win32"]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _hub() -> Finding:
    """Access to the Hub: any answer will do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        words = f"{constants.ENDPOINT} cannot be reached: {error or type(error).__name__}"
        return Finding("Hub", "missing", words, "check the network, proxies and HF_HUB_OFFLINE")
    return Finding("Hub", "ok", f"{constants.ENDPOINT} answers")

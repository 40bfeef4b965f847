"""`--version`: what a report of a problem must name."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

PACKAGES = ("torch", "triton", "transformers", "safetensors")


def version_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--version` to a command."""
    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show,
        help="Show versions and the GPU, and exit.",
    )(command)


def _show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    click.echo(f"{context.info_name} {version('lowbit')}, {system}")
    click.echo(", ".join(map(_package, PACKAGES)))
    click.echo(f"GPU: {_gpus()}")
    context.exit()


def _package(name: str) -> str:
    """Name and version of a package."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def _gpus() -> str:
    """The GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this torch is built for CPUs"
        return f"none that torch can use{built}"
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        size = f"{about.total_memory / 1e9:.0f} GB"
        found.append(f"{about.name}, {size}, compute capability {about.major}.{about.minor}")
    return f"{'; '.join(found)}; CUDA {torch.version.cuda}"

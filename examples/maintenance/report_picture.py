"""Photograph the top of a quality report with headless Chromium, as the README shows it.

    lowbit-convert examples/models/tiny-qwen3 tiny-qwen3-int4 --report \\
        --eval-text examples/data/stories-eval.txt
    python examples/maintenance/report_picture.py tiny-qwen3-int4/quality.html \\
        examples/data/report.png
"""

import shutil
import subprocess
from pathlib import Path

import click

WIDTH, HEIGHT = 1000, 728  # pixels; the verdict and its figures end there


@click.command()
@click.argument("report", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(report: Path, out: Path) -> None:
    """Photograph the top of REPORT, a quality.html, as OUT, a PNG file."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise click.ClickException("Chromium is not installed (apt-get install chromium)")
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={out.resolve()}"),
        report.resolve().as_uri(),
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

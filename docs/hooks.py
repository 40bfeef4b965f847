"""Hooks of the site's build: texts that stand beside the code are pages, too.

A page links to them as GitHub does, by `../formats/SPEC.md`; in the site they lie in docs/.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    *("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "formats/SPEC.md"),
    *("convert/export/ENGINES.md", "runtime/kernels/LOG.md"),
)
PICTURES = ("examples/data/speed.svg", "examples/data/kl.svg", "examples/data/report.png")


def on_files(files: Files, config: Any) -> Files:
    """Add the texts and pictures beside the code."""
    for name in (*PAGES, *PICTURES):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links out of docs/ lead into the site."""
    return markdown.replace("](../", "](")

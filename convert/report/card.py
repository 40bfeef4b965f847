"""A draft of the model card: README.md with the front matter the Hub reads."""

import json
import re
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from lowbit.convert.quality.record import QualityReport
from lowbit.convert.report import words
from lowbit.convert.report.terminal import size_text
from lowbit.convert.report.verdict import judge, kinds, main_bits, scheme_text
from lowbit.formats.manifest import Manifest

TEMPLATE = "card.md.jinja"
VLLM_GROUPS = (None, 32, 64, 128)
VLLM_BITS = (4, 8)


def render_card(
    report: QualityReport, manifest: Manifest | None, name: str, license_id: str | None
) -> str:
    """The card, with places to fill in marked TODO.

    Args:
        report: what was measured.
        manifest: of the packed folder, None where it has none.
        name: of the model.
        license_id: of the source, None where it is not known.
    """
    # Not HTML: values are made safe for Markdown and YAML by the two filters instead.
    environment = Environment(
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        kl=words.kl, percent=words.percent, cosine=words.cosine, md=_markdown, yaml=_yaml
    )
    template = environment.from_string(Path(__file__).with_name(TEMPLATE).read_text("utf-8"))
    schemes = {(row.bits, row.group_size) for row in report.weights}
    return template.render(
        name=name,
        report=report,
        logits=report.logits,
        verdict=judge(report),
        change="" if report.logits is None else words.perplexity_change(report.logits),
        scored="" if report.logits is None else words.scored(report.logits),
        size_text=size_text(report),
        bits=main_bits(report.weights),
        kinds=kinds(report.weights),
        base_model=None if manifest is None else manifest.source.repo,
        license_id=license_id,
        schemes=sorted({scheme_text(row) for row in report.weights}),
        vllm=all(bits in VLLM_BITS and group in VLLM_GROUPS for bits, group in schemes),
        text_only=manifest is not None and bool(manifest.recipe.get("drop_vision")),
        two_precisions=len({bits for bits, _ in schemes}) > 1,
    )


def read_license(readme: Path) -> str | None:
    """The license a card's front matter names; None where there is no card or no license."""
    if not readme.is_file():
        return None
    text = readme.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = front and re.search(r"^license:[ \t]*[\"']?([\w.+-]+)", front[1], re.MULTILINE)
    return found[1] if found else None


def _markdown(value: str) -> str:
    """Text that stays text inside a table, a heading or a code span."""
    return re.sub(r"[`|<>\[\]\r\n\t]", " ", value).strip()


def _yaml(value: str) -> str:
    """A quoted scalar; JSON strings are YAML."""
    return json.dumps(value)

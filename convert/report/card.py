"""The model card: README.md with the front matter the Hub reads."""

import math
import re
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from lowbit.convert.measure.build import weight_bits
from lowbit.convert.measure.pair import is_rotated
from lowbit.convert.measure.record import QualityReport
from lowbit.convert.plan.readers import vllm_reasons
from lowbit.convert.report import formatting
from lowbit.convert.report.html import recipe_facts
from lowbit.convert.report.linears import kinds, most_frequent
from lowbit.convert.report.metadata import front_matter
from lowbit.convert.report.source_card import SourceCard
from lowbit.convert.report.verdict import judge
from lowbit.formats.architectures import is_drafter, kind_of, part_of
from lowbit.formats.layout.manifest import Manifest
from lowbit.formats.layout.quantization_config import unserved
from lowbit.formats.layout.scheme import SERVED_BITS
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.tasks import TaskReport

TEMPLATE = "card.md.jinja"
NO_TARGET = "FOLDER"  # stands in commands until there is a repository


def render_card(
    packed: PackedCheckpoint,
    report: QualityReport | None,
    tasks: TaskReport | None,
    source: SourceCard,
    name: str,
    target: str = NO_TARGET,
) -> str:
    """The card as Markdown; it says if the base model or its license is not known.

    Args:
        packed: the folder.
        report: measured figures, None where nothing was measured.
        tasks: results of tasks, None where none were run.
        source: facts stated about the original.
        name: of the model.
        target: model in the card's commands: a repository, or NO_TARGET.
    """
    # The card is Markdown, not HTML: filters make values safe instead of escapes.
    environment = Environment(
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        kl=formatting.kl,
        percent=formatting.percent,
        cosine=formatting.cosine,
        number=formatting.number,
        signed=formatting.signed,
        md=_markdown,
        code=_code,
    )
    template = environment.from_string(Path(__file__).with_name(TEMPLATE).read_text("utf-8"))
    manifest = packed.manifest
    linears = [
        (spec.module, spec.shape, scheme)
        for spec in packed.specs
        if (scheme := packed.schemes.get(spec.module)) is not None
    ]
    schemes = [scheme for _, _, scheme in linears]
    bits = most_frequent((scheme.bits, math.prod(shape)) for _, shape, scheme in linears)
    vision = bool(packed.carried)
    text_only = manifest is not None and bool(manifest.recipe.get("drop_vision"))
    logits = None if report is None else report.logits
    fetched = None if manifest is None else manifest.source.repo
    return template.render(
        front_matter=front_matter(name, manifest, bits, source, not vision, report, tasks),
        name=name,
        target=target,
        on_hub=target != NO_TARGET,
        base_model=source.base_model or fetched,
        fetched=fetched,
        commit=None if manifest is None else manifest.source.commit,
        family=kind_of(packed.checkpoint.config),
        source=source,
        version=_version(manifest, report),
        schemes=sorted({str(scheme) for scheme in schemes}),
        recipe=[] if manifest is None else recipe_facts(manifest.recipe),
        command=None if report is None else report.command,
        logits=logits,
        kinds=[] if report is None else kinds(report.weights),
        verdict=None if report is None or logits is None else judge(report),
        change="" if logits is None else formatting.perplexity_change(logits),
        scored="" if logits is None else formatting.scored(logits),
        size_text=_size(packed) if report is None else formatting.size_text(report),
        tasks=tasks,
        report=report,
        vllm=vllm_reasons(linears),
        lowbit_run=next((why for s in schemes if (why := unserved(s, SERVED_BITS))), None),
        head_packed=packed.schemes.get("lm_head") is not None,
        vision=vision,
        text_only=text_only,
        several_schemes=len(set(schemes)) > 1,
        mtp=any(part_of(packed.checkpoint.config, spec.name) == "mtp" for spec in packed.specs),
        drafter=is_drafter(packed.checkpoint.config),
        rotated=is_rotated(manifest),
        verifiable=manifest is not None,
    )


def _version(manifest: Manifest | None, report: QualityReport | None) -> str | None:
    """Version of the lowbit that packed the folder; None where another tool did."""
    if manifest is not None:
        return manifest.lowbit_version
    return None if report is None else report.lowbit_version


def _size(packed: PackedCheckpoint) -> str:
    """Bytes of the tensors and bits per weight, of a folder without a report."""
    size = sum(info.nbytes for info in packed.checkpoint.tensors.values())
    bits = weight_bits(packed.checkpoint, packed.manifest)
    return f"{formatting.size(size)}, {bits:.2f} bits per weight"


def _markdown(value: str) -> str:
    """Text without the characters that Markdown reads as a table, a tag or a code span."""
    return re.sub(r"[`|<>\[\]\r\n\t]", " ", value).strip()


def _code(value: str) -> str:
    """Text on one line, without the mark that ends a fenced block."""
    return re.sub(r"[`\r\n\t]", " ", value).strip()

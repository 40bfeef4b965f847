"""The model card: README.md with the front matter the Hub reads."""

import math
from typing import Any

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.plan.compatibility import (
    packed_drafter,
    signed_scales,
    vllm_reasons,
    vllm_use,
)
from lowbit.convert.report import formatting
from lowbit.convert.report.html import recipe_facts
from lowbit.convert.report.linears import kinds
from lowbit.convert.report.metadata import front_matter
from lowbit.convert.report.page import environment
from lowbit.convert.report.source_card import SourceCard
from lowbit.convert.report.verdict import judge
from lowbit.formats.architectures import is_drafter, kind_of, part_of
from lowbit.formats.kept_vocabulary import read_kept_vocabulary
from lowbit.formats.layout.manifest import Manifest, is_rotated
from lowbit.formats.layout.quantization_config import unserved
from lowbit.formats.layout.scheme import SERVED_BITS, Scheme, of_most_weights
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.tasks import TaskReport
from lowbit.formats.weight_bits import weight_bits

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

    `target` is the model in its commands, a repository or NO_TARGET.
    """
    manifest = packed.manifest
    fetched = None if manifest is None else manifest.source.repo
    weights = ((scheme.bits, math.prod(shape)) for _, shape, scheme in _linears(packed))
    bits = of_most_weights(weights)
    return (
        environment(markdown=True)
        .get_template(TEMPLATE)
        .render(
            **_of_folder(packed),
            **_of_report(report),
            front_matter=front_matter(
                name, manifest, bits, source, not packed.carried, report, tasks
            ),
            name=name,
            target=target,
            on_hub=target != NO_TARGET,
            base_model=source.base_model or fetched,
            fetched=fetched,
            source=source,
            version=_version(manifest, report),
            size_text=_size(packed) if report is None else formatting.size_text(report),
            tasks=tasks,
        )
    )


def _of_folder(packed: PackedCheckpoint) -> dict[str, Any]:
    """Values of the template that the folder itself gives."""
    config, manifest = packed.checkpoint.config, packed.manifest
    linears = _linears(packed)
    schemes = [scheme for _, _, scheme in linears]
    return {
        "commit": None if manifest is None else manifest.source.commit,
        "family": kind_of(config),
        "schemes": sorted({str(scheme) for scheme in schemes}),
        "several_schemes": len(set(schemes)) > 1,
        "recipe": [] if manifest is None else recipe_facts(manifest.recipe),
        "vllm": vllm_reasons(linears),
        "lowbit_run": next((why for s in schemes if (why := unserved(s, SERVED_BITS))), None),
        "vllm_use": vllm_use(
            config, packed.schemes.get("lm_head") is not None, bool(packed.carried)
        ),
        "signed_scales": signed_scales(
            None if manifest is None else manifest.recipe.get("scales"), schemes
        ),
        "vision": bool(packed.carried),
        "tower": {
            "size": formatting.size(packed.carried_bytes),
            "dtypes": packed.carried_dtypes,
        },
        "text_only": manifest is not None and bool(manifest.recipe.get("drop_vision")),
        "mtp": any(part_of(config, spec.name) == "mtp" for spec in packed.specs),
        "drafter": is_drafter(config),
        "packed_drafter": packed_drafter(config, packed.schemes.values()),
        "frequent": None if manifest is None else manifest.frequent_rows,
        "rotated": is_rotated(manifest),
        "kept": read_kept_vocabulary(packed.checkpoint.folder),
        "verifiable": manifest is not None,
    }


def _of_report(report: QualityReport | None) -> dict[str, Any]:
    logits = None if report is None else report.logits
    return {
        "report": report,
        "command": None if report is None else report.command,
        "logits": logits,
        "kinds": [] if report is None else kinds(report.weights),
        "verdict": None if report is None or logits is None else judge(report),
        "change": "" if logits is None else formatting.perplexity_change(logits),
        "scored": "" if logits is None else formatting.scored(logits),
    }


def _linears(packed: PackedCheckpoint) -> list[tuple[str, tuple[int, ...], Scheme]]:
    return [
        (spec.module, spec.shape, scheme)
        for spec in packed.specs
        if (scheme := packed.schemes.get(spec.module)) is not None
    ]


def _version(manifest: Manifest | None, report: QualityReport | None) -> str | None:
    """Version of the lowbit that packed the folder; None where another tool did."""
    if manifest is not None:
        return manifest.lowbit_version
    return None if report is None else report.lowbit_version


def _size(packed: PackedCheckpoint) -> str:
    size = sum(info.nbytes for info in packed.checkpoint.tensors.values())
    bits = weight_bits(packed.checkpoint, packed.manifest)
    return f"{formatting.size(size)}, {bits:.2f} bits per weight"

"""Results of the commands, as terminal tables and as JSON objects."""

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from lowbit.convert.cli.tables.prospect import methods, prospect_json
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.pipeline.preview import Preview
from lowbit.convert.pipeline.verification import Verification
from lowbit.convert.plan.plan import Plan, Step
from lowbit.convert.plan.readers import (
    one_scheme_misfits,
    runtime_verdict,
    smaller_groups,
    transformers_verdict,
    vllm_verdict,
)
from lowbit.convert.report.remarks import rounded_head
from lowbit.convert.report.reporting import Reported
from lowbit.convert.report.terminal import WORST, render_terminal
from lowbit.convert.report.verdict import judge
from lowbit.convert.report.words import percent, size
from lowbit.formats.architectures import Part, is_drafter, part_of
from lowbit.formats.architectures.names import MTP_PREFIX, any_expert, split_layer, without_model
from lowbit.formats.layout.manifest import DraftVocabulary
from lowbit.formats.printable import printable
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results, styled
from lowbit.formats.text.tokenizer import TOKENIZER_FILE

DONE = ("✓", "bold green")
PARTS: dict[Part, str] = {
    "decoder": "decoder",
    "mtp": "multi-token prediction",
    "vision": "vision tower",
}


def conversion(done: Conversion, found: Reported) -> None:
    """Print the folder, its quality, and where the report is, if its files were written."""
    console = results()
    quality = found.quality
    if done.existed:
        words = f"was there already, checked in {done.seconds:.1f} s"
    else:
        resumed = f", {done.resumed} tensors kept from an earlier run" if done.resumed else ""
        words = f"written in {done.seconds:.1f} s{resumed}"
    console.print(styled(DONE, f" {done.folder} {words}"))
    if done.calibration:
        console.print(_calibration(done))
        if head := rounded_head(quality.weights):
            console.print(Text(f"multi-token prediction: {head}"))
    if done.undistilled:
        text = (
            f" distillation did not lower the loss on windows held out: {done.undistilled} of "
            f"{len(done.calibration)} layers keep the codes before it"
        )
        console.print(styled(("!", "yellow"), text))
    render_terminal(console, quality, worst_rows=0 if quality.logits is None else WORST)
    for what, reasons in (
        ("vLLM", vllm_verdict(done.plan)),
        ("transformers", [reason] if (reason := transformers_verdict(done.plan)) else []),
        ("lowbit-run", [reason] if (reason := runtime_verdict(done.plan)) else []),
    ):
        for text in reasons:
            console.print(styled(("!", "yellow"), f" {what} cannot load the result: {text}"))
    if done.manifest.draft_head is not None:
        console.print(_draft_head(done.manifest.draft_head))
    if missing := without_tokenizer(done):
        console.print(styled(("!", "yellow"), f" {missing}"))
    _files(found)
    for command in next_commands(done, found):
        note(f"next: {shlex.join(command)}", fold=False)


def without_tokenizer(done: Conversion) -> str | None:
    """Sentence on a source that brings no tokenizer; None where it does, or needs none."""
    if is_drafter(done.plan.config) or (done.folder / TOKENIZER_FILE).is_file():
        return None
    source = done.source.repo or done.source.folder
    return (
        f"`{source}` has no {TOKENIZER_FILE}: lowbit-run takes no text for the result, and cannot "
        f"chat; copy the model's {TOKENIZER_FILE} and tokenizer_config.json to "
        f"`{done.folder}`"
    )


def next_commands(done: Conversion, found: Reported) -> list[list[str]]:
    """Commands that judge the folder and run it; those that it lacks something for left out."""
    folder = str(done.folder)
    drafter, readable = is_drafter(done.plan.config), without_tokenizer(done) is None
    commands = []
    if found.quality.logits is None and readable and not drafter:
        commands.append(["lowbit-convert", "report", folder])
    if drafter:
        commands.append(["lowbit-run", "MODEL", "--speculate", "dflash", "--drafter", folder])
    elif readable and runtime_verdict(done.plan) is None:
        commands.append(["lowbit-run", folder])
    return commands


def _draft_head(made: DraftVocabulary) -> Text:
    """The draft head, and the share of the text that its tokens are."""
    if made.text is None:
        return Text(f"draft head: {made.rows:,} tokens by id, without a tokenizer to count them")
    return Text(
        f"draft head: {made.rows:,} tokens, {percent(made.coverage, 1)} of {printable(made.text)}, "
        f"{percent(made.held_out, 1)} of the half left out of a count"
    )


def _files(found: Reported) -> None:
    """Name the report's page, and notes on what its files leave out."""
    if found.page is not None:
        note(f"report: {found.page}")
    for text in found.notes:
        note(f"! {text}")


def _calibration(done: Conversion) -> Table:
    """Errors of each calibrated layer beside those of rounding to nearest."""
    method = done.plan.recipe.method
    when = "layer errors before distillation" if method.distill else "layer errors"
    title = f"{when}, {method} against round-to-nearest"
    table = plain_table(title, ("layer",), ("rtn", "chosen", "change"))
    for row in done.calibration:
        change = f"{row.chosen / row.rtn - 1:+.0%}" if row.rtn else ""
        table.add_row(str(row.layer), f"{row.rtn:.4f}", f"{row.chosen:.4f}", change)
    return table


def conversion_json(done: Conversion, found: Reported) -> dict[str, Any]:
    """The object of `quantize --json`."""
    quality, made = found.quality, done.manifest.draft_head
    return {
        "folder": str(done.folder),
        "method": str(done.plan.recipe.method),
        "source_bytes": done.plan.source_bytes,
        "output_bytes": done.plan.output_bytes,
        "bits_per_weight": done.plan.bits_per_weight,
        "resumed_steps": done.resumed,
        "seconds": done.seconds,
        "calibration": [asdict(row) for row in done.calibration],
        "draft_head": made and asdict(made),
        "undistilled_layers": done.undistilled,
        "verdict": asdict(judge(quality)),
        "quality": quality.to_json(),
        "notes": [*filter(None, [without_tokenizer(done)]), *found.notes],
    }


def plan(view: Preview) -> None:
    """Show the fate of every kind of tensor, sizes, memory and the vLLM verdict."""
    console = results()
    title = f"plan for {view.source}"
    table = plain_table(title, ("tensor", "shape", "becomes"), ("count", "from", "to"))
    for kind, steps in _kinds(view.plan).items():
        first = steps[0]
        table.add_row(
            styled(kind.name, (" of the embedding" if first.rereads else "", "dim")),
            _shape(kind.shape),
            _fate(first),
            str(len(steps)),
            size(sum(step.source.nbytes for step in steps)) if not first.rereads else "",
            size(sum(step.output_bytes for step in steps)),
        )
    console.print(table)
    dropped = Counter(step.reason for step in view.plan.steps if step.fate == "dropped")
    for reason, count in dropped.items():
        console.print(f"{count} dropped ({reason})")
    parts = view.plan.parameters
    if len(parts) > 1:
        counts = (f"{part} {count / 1e6:,.1f} M" for part, count in parts.items())
        console.print(f"{sum(parts.values()):,} parameters: {', '.join(counts)}")
    console.print(
        f"{size(view.plan.source_bytes)} → {size(view.plan.output_bytes)} in "
        f"{len(view.plan.shards)} file{'s' if len(view.plan.shards) > 1 else ''}, "
        f"{view.plan.bits_per_weight:.2f} bits per weight; other files {size(view.other_bytes)}"
    )
    if view.plan.draft_rows:
        console.print(
            f"draft head: {view.plan.draft_rows:,} rows of lm_head, INT4, "
            f"{size(view.plan.draft_bytes)} in draft/"
        )
    groups = smaller_groups(view.plan)
    if groups is not None:
        console.print(groups)
    console.print(f"peak RAM of the conversion: at most {size(view.peak_ram)}")
    console.print(methods(view.prospect))
    console.print(
        f"memory to run it on a GPU: {size(view.run_bytes)} of weights, "
        f"{size(view.sequence_bytes)} for a context of {view.context:,} tokens, or "
        f"{size(view.int8_sequence_bytes)} with --kv-cache int8"
    )
    if any(step.rereads for step in view.plan.steps):
        cost = ", but rules out the rotation" if view.plan.rotated else ""
        console.print(
            "the head is untied: it adds bytes and is read faster; "
            f"--lm-head bf16 keeps it tied and the file smaller{cost}"
        )
    if view.plan.recipe.drop_vision:
        console.print(
            "without its vision tower the result loads through text classes only: "
            "transformers AutoModelForCausalLM, vLLM with --language-model-only"
        )
    if view.vllm:
        console.print(styled("vLLM: ", ("cannot load the result", "bold red")))
        for reason in view.vllm:
            console.print(f"  {reason}")
    else:
        console.print("vLLM: can load the result" + _head_note(view))
    if wrong := transformers_verdict(view.plan):
        console.print(styled("transformers: ", ("cannot load the result", "bold red")))
        console.print(f"  {wrong}")
    if misfits := one_scheme_misfits(view.plan):
        console.print(
            f"export to gptq or awq: needs --dequantize for {', '.join(misfits)}; mlx and gguf "
            "need nothing"
        )
    if view.unserved:
        console.print(styled("lowbit-run: ", ("cannot serve the result", "bold red")))
        console.print(f"  {view.unserved}")


def _head_note(view: Preview) -> str:
    quantized = view.plan.schemes.get("lm_head") is not None
    return " (a quantized lm_head needs a release from 2026-03 on)" if quantized else ""


def plan_json(view: Preview) -> dict[str, Any]:
    """The object of `plan --json`."""
    wrong = transformers_verdict(view.plan)
    return {
        "source": view.source,
        "recipe": view.plan.recipe.to_json(),
        "source_bytes": view.plan.source_bytes,
        "output_bytes": view.plan.output_bytes,
        "other_bytes": view.other_bytes,
        "bits_per_weight": view.plan.bits_per_weight,
        "parameters": dict(view.plan.parameters),
        "draft_rows": view.plan.draft_rows,
        "draft_bytes": view.plan.draft_bytes,
        "peak_ram_bytes": view.peak_ram,
        "prospect": prospect_json(view.prospect),
        "smaller_groups": smaller_groups(view.plan),
        "dequantized_for_gptq_and_awq": one_scheme_misfits(view.plan),
        "run": {
            "weight_bytes": view.run_bytes,
            "context": view.context,
            "sequence_bytes": view.sequence_bytes,
            "int8_sequence_bytes": view.int8_sequence_bytes,
        },
        "vllm": {"loads": not view.vllm, "reasons": list(view.vllm)},
        "transformers": {"loads": wrong is None, "reason": wrong},
        "lowbit_run": {"serves": view.unserved is None, "reason": view.unserved},
        "files": [{"name": s.file, "size_bytes": s.size} for s in view.plan.shards],
        "tensors": [
            {
                "name": step.source.name,
                "dtype": step.source.dtype_name,
                "shape": list(step.source.shape),
                "fate": step.fate,
                "reason": step.reason,
                "scheme": str(step.scheme) if step.scheme else None,
                "outputs": [name for name, _, _ in step.outputs],
                "output_bytes": step.output_bytes,
            }
            for step in view.plan.steps
        ],
    }


class Kind(NamedTuple):
    """Properties that the tensors of a row share."""

    name: str
    shape: tuple[int, ...] | None
    stored: str
    rereads: bool = False


def _kinds(plan: Plan) -> dict[Kind, list[Step]]:
    """Steps that differ by the numbers of layer and expert alone, together."""
    kinds: dict[Kind, list[Step]] = {}
    for step in plan.steps:
        info = step.source
        stored = str(step.scheme or info.dtype_name if step.fate != "dropped" else step.fate)
        name = f"{step.module}.weight" if step.rereads else info.name
        kind = _kind(part_of(plan.config, name), name, info.shape, stored, step.scheme is None)
        kinds.setdefault(kind._replace(rereads=step.rereads), []).append(step)
    return kinds


def _kind(part: Part, name: str, shape: tuple[int, ...], stored: str, dense: bool) -> Kind:
    """`mlp.up_proj` for every layer's; parts beside the decoder in one row where they are dense."""
    if part == "vision" or (part == "mtp" and dense):
        return Kind(PARTS[part], None, stored)
    short = without_model(split_layer(any_expert(name)).rest).removesuffix(".weight")
    if part == "mtp":
        short = MTP_PREFIX + short.removeprefix(MTP_PREFIX)
    return Kind(short, shape, stored)


def _shape(sizes: Iterable[int] | None) -> str:
    return "" if sizes is None else "x".join(map(str, sizes))


def _fate(step: Step) -> Text:
    if step.fate == "quantized":
        return styled((str(step.scheme), "cyan"))
    if step.fate == "rotated":
        return styled(f"{step.source.dtype_name}, rotated")
    return styled(("dropped", "yellow") if step.fate == "dropped" else step.source.dtype_name)


def verification(result: Verification) -> None:
    """Print the checks that passed."""
    console = results()
    console.print(
        styled(
            DONE,
            f" {result.folder}: {result.files} files, {result.tensors} tensors, "
            f"{size(result.size_bytes)}: layout, completeness and every hash as in lowbit.json",
        )
    )
    if result.source_tensors is not None:
        console.print(styled(DONE, f" {result.source_tensors} tensors of the source as recorded"))
    if result.derived:
        console.print(
            styled(DONE, " every byte follows from the source and the recipe: quantized again")
        )
    if result.not_derived is not None:
        console.print(styled(("!", "yellow"), f" not quantized again: {result.not_derived}"))
    if result.unlisted:
        console.print(styled((f"not covered: {', '.join(result.unlisted)}", "dim")))


def verification_json(result: Verification) -> dict[str, Any]:
    """The object of `verify --json`."""
    return {**asdict(result), "folder": str(result.folder), "ok": True}


def quality(found: Reported) -> None:
    """Show a quality report, and where its page is, if its files were written."""
    console = results()
    render_terminal(console, found.quality)
    _files(found)


def quality_json(folder: Path, found: Reported) -> dict[str, Any]:
    """The object of `report --json`."""
    return {
        "folder": str(folder),
        "verdict": asdict(judge(found.quality)),
        "quality": found.quality.to_json(),
        "notes": list(found.notes),
    }

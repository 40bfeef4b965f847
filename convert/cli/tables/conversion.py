"""Results of the commands, as terminal tables and as JSON objects."""

import shlex
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lowbit.convert.api import Result
from lowbit.convert.cli.tables.lines import aside, ok, warn
from lowbit.convert.cli.tables.plan import refusals
from lowbit.convert.cli.tables.vocabulary import cut_original
from lowbit.convert.measure.gate import gate_json
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.pipeline.finetune import Finetuned
from lowbit.convert.pipeline.verification import Verification
from lowbit.convert.plan.compatibility import runtime_verdict
from lowbit.convert.report.formatting import MISSING, ORDINALS, number, percent, size
from lowbit.convert.report.reporting import Reported
from lowbit.convert.report.terminal import WORST, render_terminal
from lowbit.convert.report.verdict import judge, stated_verdict
from lowbit.convert.report.warnings import rounded_head
from lowbit.convert.texts.own_text import OwnText
from lowbit.formats.architectures import is_drafter
from lowbit.formats.layout.manifest import CountedRows
from lowbit.formats.printable import printable
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results
from lowbit.formats.text.tokenizer import TOKENIZER_FILE


def conversion(result: Result) -> None:
    """Print the folder, its quality, and where the report is, if its files were written."""
    console, done, found = results(), result.conversion, result.report
    quality = found.quality
    if done.existed:
        words = f"was there already, checked in {done.seconds:.1f} s"
    else:
        resumed = f", {done.resumed} tensors kept from an earlier run" if done.resumed else ""
        words = f"written in {done.seconds:.1f} s{resumed}"
    ok(f"{done.folder} {words}")
    if done.calibration:
        console.print(_calibration(done))
        if head := rounded_head(quality.weights):
            console.print(Text(f"multi-token prediction: {head}"))
    render_terminal(console, quality, worst_rows=0 if quality.logits is None else WORST)
    for engine, reasons in refusals(done.plan).items():
        for text in reasons:
            warn(f"{engine} cannot load the result: {text}")
    for name, made in _head_rows(done):
        console.print(_described(name, made))
    if missing := without_tokenizer(done):
        warn(missing)
    _files(found)
    for command in next_commands(done, found):
        note(f"next: {shlex.join(command)}", fold=False)
    if result.cut is not None:
        cut_original(result.cut, quality.logits is not None)


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
    """Commands that judge the folder, chat with it and serve it; without those it cannot take."""
    folder = str(done.folder)
    drafter, readable = is_drafter(done.plan.config), without_tokenizer(done) is None
    commands = []
    if found.quality.logits is None and readable and not drafter:
        commands.append(["lowbit-convert", "report", folder])
    if drafter:
        commands.append(["lowbit-run", "MODEL", "--speculate", "dflash", "--drafter", folder])
    elif readable and runtime_verdict(done.plan) is None:
        commands += [["lowbit-run", folder], ["lowbit-run", "serve", folder]]
    return commands


def _head_rows(done: Conversion) -> list[tuple[str, CountedRows]]:
    """Rows of the head in files of their own, by what they are."""
    made = {
        "draft head": done.manifest.draft_head,
        "frequent rows of the head": done.manifest.frequent_rows,
    }
    return [(name, rows) for name, rows in made.items() if rows is not None]


def _described(name: str, made: CountedRows) -> Text:
    if made.text is None:
        return Text(f"{name}: {made.rows:,} tokens by id, without a tokenizer to count them")
    return Text(
        f"{name}: {made.rows:,} tokens, {percent(made.coverage, 1)} of {printable(made.text)}, "
        f"{percent(made.held_out, 1)} of the half left out of a count"
    )


def _files(found: Reported) -> None:
    if found.page is not None:
        note(f"report: {found.page}")
    for text in found.notes:
        note(f"! {text}")


def _calibration(done: Conversion) -> Table:
    """Errors of each calibrated layer beside those of rounding to nearest."""
    method = done.plan.method
    title = f"relative errors of layers' outputs, {method} against round-to-nearest (rtn)"
    table = plain_table(title, ("layer",), ("rtn", "chosen", "change"))
    for row in done.calibration:
        change = f"{row.chosen / row.rtn - 1:+.0%}" if row.rtn else ""
        table.add_row(str(row.layer), f"{row.rtn:.4f}", f"{row.chosen:.4f}", change)
    return table


def conversion_json(result: Result) -> dict[str, Any]:
    """The object of `quantize --json`, but for what was published."""
    done, found = result.conversion, result.report
    quality, made = found.quality, done.manifest.draft_head
    frequent = done.manifest.frequent_rows
    verdict = judge(quality)
    return {
        "folder": str(done.folder),
        "method": str(done.plan.method),
        "source_bytes": done.plan.source_bytes,
        "output_bytes": done.plan.output_bytes,
        "bits_per_weight": done.plan.bits_per_weight,
        "resumed_steps": done.resumed,
        "seconds": done.seconds,
        "calibration": [asdict(row) for row in done.calibration],
        "draft_head": made and asdict(made),
        "frequent_rows": frequent and asdict(frequent),
        "verdict": asdict(verdict),
        "quality": quality.to_json(stated_verdict(verdict)),
        "notes": [*filter(None, [without_tokenizer(done)]), *found.notes],
        "gate": gate_json(result.gate) if result.gate else None,
        "vocabulary": None if result.cut is None else result.cut.record.summary(),
    }


def verification(result: Verification) -> None:
    """Print the checks that passed."""
    ok(
        f"{result.folder}: {result.files} files, {result.tensors} tensors, "
        f"{size(result.size_bytes)}: layout, completeness and every hash as in lowbit.json"
    )
    if result.source_tensors is not None:
        ok(f"{result.source_tensors} tensors of the source as recorded")
    if result.derived:
        ok("every byte follows from the source and the recipe: quantized again")
    if result.not_derived is not None:
        warn(f"not quantized again: {result.not_derived}")
    if result.unlisted:
        aside(f"not covered: {', '.join(result.unlisted)}")


def quality(found: Reported) -> None:
    """Show a quality report, and where its page is, if its files were written."""
    render_terminal(results(), found.quality)
    _files(found)


def quality_json(folder: Path, found: Reported) -> dict[str, Any]:
    """The object of `report --json`."""
    verdict = judge(found.quality)
    return {
        "folder": str(folder),
        "verdict": asdict(verdict),
        "quality": found.quality.to_json(stated_verdict(verdict)),
        "notes": list(found.notes),
    }


def finetuned(done: Finetuned) -> None:
    """Print the drafts before and after, and what became of the folder."""
    title = f"drafts on {done.held_out} windows held out, learned on {done.windows}"
    table = plain_table(title, ("draft",), ("before", "after", "tokens a round", "after "))
    for name, before, after in zip_longest(ORDINALS, done.before, done.after):
        pair = (before, after)
        right = (MISSING if x is None else percent(x.agreement, 1) for x in pair)
        tokens = (MISSING if x is None else number(x.tokens_a_round, 2) for x in pair)
        table.add_row(name, *right, *tokens)
    results().print(table)
    seconds = f"{done.steps} steps in {done.seconds:.0f} s"
    if done.exchanged:
        ok(f"{done.folder} has the trained head, {seconds}")
    else:
        warn(f"{done.folder} is as it was: no better after {seconds}")


def own_text(done: OwnText, source: str, revision: str | None) -> None:
    """Show the file, answers, tokens and time, and the command that calibrates on it."""
    cut = len(done.answers) - done.ended
    ok(
        f"{done.file} written in {done.seconds:.1f} s: {len(done.answers):,} answers of "
        f"{done.tokens:,} tokens ({cut:,} were cut), then the bundled text"
    )
    chosen = [] if revision is None else ["--revision", revision]
    command = ["lowbit-convert", source, "OUT", "--calib", str(done.file), *chosen]
    note(f"next: {shlex.join(command)}", fold=False)


def own_text_json(done: OwnText) -> dict[str, Any]:
    """Figures of `own_text` as the object of `--json`."""
    return {
        "file": str(done.file),
        "answers": len(done.answers),
        **{name: getattr(done, name) for name in ("ended", "tokens", "batch", "seconds")},
    }

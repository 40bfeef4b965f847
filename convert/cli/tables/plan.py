"""Plan, time and memory of a conversion that has not begun, as lines, tables and JSON objects."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from lowbit.convert.cli.tables import target
from lowbit.convert.original.device import device_name
from lowbit.convert.pipeline.effort import effort_line
from lowbit.convert.pipeline.estimate import Estimate, conversion_memory, run_memory
from lowbit.convert.pipeline.predicted_size import PredictedSizes
from lowbit.convert.plan.compatibility import (
    VllmUse,
    few_bits,
    one_scheme_misfits,
    packed_drafter,
    runtime_verdict,
    signed_scales,
    smaller_groups,
    transformers_verdict,
    use_by_vllm,
    vllm_verdict,
    why_not_exported,
)
from lowbit.convert.plan.effort import EffortPlan
from lowbit.convert.plan.plan import Plan, TensorPlan
from lowbit.convert.report.formatting import size
from lowbit.formats.architectures import Part, part_of
from lowbit.formats.architectures.names import MTP_PREFIX, any_expert, split_layer, without_model
from lowbit.formats.shell.duration import about
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import plain_table, results, styled

FEW_TOKENS = 10_000  # of a calibration text, below which codes follow chance
PARTS: dict[Part, str] = {
    "decoder": "decoder",
    "mtp": "multi-token prediction",
    "vision": "vision tower",
}


def plan(source: str, ahead: Estimate, sizes: PredictedSizes) -> None:
    """Show the fate of every kind of tensor, sizes, memory and the vLLM verdict."""
    console, made = results(), ahead.plan
    console.print(_tensors(source, made))
    for line in _size_lines(made, sizes):
        console.print(line)
    need = conversion_memory(ahead)
    on_gpu = f", {size(need.gpu)} of GPU memory" if need.gpu else ""
    console.print(f"memory that the conversion takes: {size(need.ram)} of RAM{on_gpu}")
    if ahead.effort is not None:
        for line in effort_lines(ahead.effort):
            console.print(line)
    console.print(methods(ahead))
    if report := ahead.report:
        rough = "" if report.counted else "about "
        again = f", and of {report.long_tokens:,} in longer windows" if report.long_tokens else ""
        spent = f"{about(report.seconds)} beside the conversion"
        console.print(
            f"--report compares logits of {rough}{report.tokens:,} tokens{again}: {spent}"
        )
    for use in _use_lines(made):
        console.print(use)
    if refused := why_not_exported(made):
        console.print(f"export: refused, {refused}")
    elif needs := _one_scheme_needs(ahead):
        console.print(f"export to gptq or awq: {needs}; mlx and gguf need nothing")


def _tensors(source: str, made: Plan) -> Table:
    """The fate of every kind of tensor."""
    title = f"plan for {source}"
    table = plain_table(title, ("tensor", "shape", "becomes"), ("count", "from", "to"))
    for kind, steps in _kinds(made).items():
        first = steps[0]
        table.add_row(
            styled(kind.name, (" of the embedding" if first.rereads else "", "dim")),
            _shape(kind.shape),
            _fate(first),
            str(len(steps)),
            size(sum(step.source.nbytes for step in steps)) if not first.rereads else "",
            size(sum(step.output_bytes for step in steps)),
        )
    return table


def _size_lines(made: Plan, sizes: PredictedSizes) -> Iterator[str]:
    """Sizes of the result, and what they come from."""
    dropped = Counter(step.reason for step in made.steps if step.fate == "dropped")
    for reason, count in dropped.items():
        yield f"{count} dropped ({reason})"
    parts = made.parameters
    if len(parts) > 1:
        counts = (f"{part} {count / 1e6:,.1f} M" for part, count in parts.items())
        yield f"{sum(parts.values()):,} parameters: {', '.join(counts)}"
    shards = f"{len(made.shards)} file{'s' if len(made.shards) > 1 else ''}"
    yield (
        f"{size(sizes.source)} → {size(sizes.folder)}, "
        f"{made.bits_per_weight:.2f} bits per weight; weights {size(made.output_bytes)} in {shards}"
    )
    if tower := _tower(made):
        yield tower
    if made.draft_rows:
        yield (
            f"draft head: {made.draft_rows:,} rows of lm_head, INT4, "
            f"{size(made.draft_bytes)} in draft/"
        )
    if made.frequent_rows:
        yield (
            f"frequent rows: {made.frequent_rows:,} rows of lm_head, INT8, "
            f"{size(made.frequent_bytes)} in frequent/"
        )
    yield from filter(None, (smaller_groups(made), few_bits(made)))


def _use_lines(made: Plan) -> Iterator[str | Text]:
    """Memory to run the result, and the engines that load it."""
    run = run_memory(made)
    images = f"; {size(run.vision_bytes)} more for images, and room for one"
    yield (
        f"memory to run it on a GPU: {size(run.weight_bytes)} of weights, "
        f"{size(run.sequence_bytes)} for a context of {run.context:,} tokens, or "
        f"{size(run.int8_sequence_bytes)} with --kv-cache int8"
        + (images if run.vision_bytes else "")
    )
    if any(step.rereads for step in made.steps):
        cost = ", but rules out the rotation" if made.rotated else ""
        yield (
            "the head is untied: it adds bytes and is read faster; "
            f"--lm-head bf16 keeps it tied and the file smaller{cost}"
        )
    if made.recipe.drop_vision:
        yield (
            "without its vision tower the result loads through text classes only: "
            "transformers AutoModelForCausalLM, vLLM with --language-model-only"
        )
    drafter = packed_drafter(made.config, made.schemes.values())
    if drafter is not None:
        yield drafter
    for engine, reasons in refusals(made).items():
        if reasons:
            yield styled(f"{engine}: ", ("cannot load the result", "bold red"))
        elif engine == "vLLM" and drafter is None:
            yield f"vLLM: can load the result {use_by_vllm(made)}".rstrip()
            if warning := signed_scales(made.recipe.rule, made.schemes.values()):
                yield f"! {warning}"
        for reason in reasons:
            yield f"  {reason}"


def _one_scheme_needs(ahead: Estimate) -> str:
    """Needs of containers with one scheme for all linears; empty where there are none."""
    if ahead.effort is not None and ahead.effort.way.costs is not None:
        method = ahead.effort.way.method
        if any(step.rereads for step in ahead.plan.steps):  # plain, the head stays the embedding
            method = method.unrotated
        return f"convert with --method {method} --lm-head bf16"
    misfits = one_scheme_misfits(ahead.plan)
    return f"needs --dequantize for {', '.join(misfits)}" if misfits else ""


def _tower(made: Plan) -> str:
    """The vision tower in one line; empty without one."""
    steps = made.vision_steps
    if not steps:
        return ""
    taken = size(sum(step.source.nbytes for step in steps))
    if made.recipe.drop_vision:
        return f"left out: the vision tower, which saves {taken}"
    dtypes = " ".join(sorted({step.source.dtype_name for step in steps}))
    return f"{taken} of that are the vision tower, which stays {dtypes}; --drop-vision saves them"


def refusals(made: Plan) -> dict[str, list[str]]:
    """Reasons why engines could not load the result, by their names; empty where they can."""
    others = {"transformers": transformers_verdict(made), "lowbit-run": runtime_verdict(made)}
    found = {engine: [] if reason is None else [reason] for engine, reason in others.items()}
    return {"vLLM": vllm_verdict(made), **found}


def plan_json(source: str, ahead: Estimate, sizes: PredictedSizes) -> dict[str, Any]:
    """The object of `plan --json`."""
    made = ahead.plan
    reasons = vllm_verdict(made)
    wrong, unserved = transformers_verdict(made), runtime_verdict(made)
    use = VllmUse() if reasons else use_by_vllm(made)
    drafter = packed_drafter(made.config, made.schemes.values())
    return {
        "source": source,
        "recipe": made.recipe.to_json(),
        "source_bytes": made.source_bytes,
        "output_bytes": made.output_bytes,
        "other_bytes": sizes.passed,
        "folder_bytes": sizes.folder,
        "bits_per_weight": made.bits_per_weight,
        "parameters": dict(made.parameters),
        "vision": {
            "source_bytes": sum(step.source.nbytes for step in made.vision_steps),
            "output_bytes": sum(step.output_bytes for step in made.vision_steps),
        },
        "draft_rows": made.draft_rows,
        "draft_bytes": made.draft_bytes,
        "frequent_rows": made.frequent_rows,
        "frequent_bytes": made.frequent_bytes,
        "peak_ram_bytes": conversion_memory(ahead).ram,
        "peak_gpu_bytes": conversion_memory(ahead).gpu,
        "effort": effort_json(ahead.effort),
        "estimate": methods_json(ahead),
        "smaller_groups": smaller_groups(made),
        "few_bits": few_bits(made),
        "dequantized_for_gptq_and_awq": one_scheme_misfits(made),
        "run": asdict(run_memory(made)),
        "vllm": {
            "loads": None if drafter is not None and not reasons else not reasons,
            "reasons": reasons,
            "release": use.release,
            "options": list(use.options),
            "warning": None if reasons else signed_scales(made.recipe.rule, made.schemes.values()),
        },
        "packed_drafter": drafter,
        "transformers": {"loads": wrong is None, "reason": wrong},
        "lowbit_run": {"serves": unserved is None, "reason": unserved},
        "files": [{"name": s.file, "size_bytes": s.size} for s in made.shards],
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
            for step in made.steps
        ],
    }


class Kind(NamedTuple):
    """Properties that the tensors of a row share."""

    name: str
    shape: tuple[int, ...] | None
    stored: str
    rereads: bool = False


def _kinds(plan: Plan) -> dict[Kind, list[TensorPlan]]:
    """Steps that differ by the numbers of layer and expert alone, together."""
    kinds: dict[Kind, list[TensorPlan]] = {}
    for step in plan.steps:
        info = step.source
        stored = _fate(step).plain
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


def _fate(step: TensorPlan) -> Text:
    if step.fate == "quantized":
        return styled((str(step.scheme), "cyan"))
    if step.fate == "rotated":
        return styled(f"{step.source.dtype_name}, rotated")
    return styled(("dropped", "yellow") if step.fate == "dropped" else step.source.dtype_name)


def announce(ahead: Estimate) -> None:
    """Note the bits chosen for a target, the method, where it computes and how long."""
    if ahead.choice is not None:
        target.choice(ahead.choice)
    if ahead.effort is None:  # else it was told before bits were chosen
        note(method_line(ahead))
    if ahead.obstacle is not None and ahead.method.codes == "gptq" and not ahead.method.rotate:
        note(f"not rotated: {ahead.obstacle}")
    tokens = ahead.windows.count * ahead.windows.length
    if ahead.method.calibrated and tokens < FEW_TOKENS:
        note(f"! {tokens:,} tokens of calibration text are few; use {FEW_TOKENS:,} or more")
    plan = ahead.plan
    drafter = packed_drafter(plan.config, plan.schemes.values())
    for sentence in (smaller_groups(plan), few_bits(plan), drafter):
        if sentence is not None:
            note(sentence)


def effort_lines(made: EffortPlan) -> list[str]:
    """The way of an effort, and what becomes of the bits."""
    lines = [effort_line(made)]
    if made.way.costs is not None:
        groups = "groups of 32, 64 or 128" if made.way.groups else "the recipe's groups"
        lines.append(
            f"bits are chosen when it begins: 4 or 8, in {groups}, one scheme for q, k and v and "
            f"one for gate and up, as vLLM loads them; --method {made.way.method} keeps the bits "
            "above"
        )
    elif made.fixed_bits is not None:
        lines.append(f"bits are not chosen by costs: {made.fixed_bits}")
    return lines


def effort_json(made: EffortPlan | None) -> dict[str, Any] | None:
    """Part of the object of `plan --json`."""
    if made is None:
        return None
    better = made.better
    return {
        "effort": made.effort,
        "method": str(made.way.method),
        "costs": made.way.costs,
        "groups": made.way.groups,
        "seconds": made.seconds,
        "reason": made.reason,
        "fixed_bits": made.fixed_bits,
        "high": None
        if better is None
        else {
            "method": str(better.method),
            "costs": better.costs,
            "groups": better.groups,
            "seconds": made.better_seconds,
        },
    }


def method_line(ahead: Estimate) -> str:
    """Method, device, time, and what the next better method would bring."""
    line = f"{ahead.method} on {device_name(ahead.device)}, {about(ahead.of(ahead.method).seconds)}"
    gain = ahead.gain
    if gain is None:
        return line
    better = about(ahead.of(gain.method).seconds)
    return f"{line}; --method {gain.method}: {better}, {gain.words}"


def methods(ahead: Estimate) -> Table:
    """Time and memory of every method; the one that would be used is marked."""
    windows = ahead.windows
    tokens = f"{windows.count * windows.length:,} tokens"
    title = f"methods on {device_name(ahead.device)}, calibrated on about {tokens} of text"
    gpu = ahead.device.type == "cuda"
    figures = ("time", "calibration's RAM", *(("GPU memory",) if gpu else ()))
    table = plain_table(title, ("method",), figures)
    for row in ahead.costs:
        mark = " (used)" if row.method == ahead.method else ""
        memory = row.memory
        sizes = ["", ""] if memory is None else [size(memory.ram), size(memory.gpu)]
        table.add_row(f"{row.method}{mark}", about(row.seconds), *sizes[: 1 + gpu])
    return table


def methods_json(ahead: Estimate) -> dict[str, Any]:
    """Part of the object of `plan --json`."""
    return {
        "device": ahead.device.type,
        "windows": ahead.windows.count,
        "window_tokens": ahead.windows.length,
        "methods": [
            {
                "method": str(row.method),
                "used": row.method == ahead.method,
                "seconds": row.seconds,
                "calibration_ram_bytes": None if row.memory is None else row.memory.ram,
                "calibration_gpu_bytes": None if row.memory is None else row.memory.gpu,
            }
            for row in ahead.costs
        ],
        "report": None if ahead.report is None else asdict(ahead.report),
    }

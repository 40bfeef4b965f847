"""Tables on stdout: findings on this machine, expected and measured speeds, models."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
from lowbit.formats.printable import printable
from lowbit.formats.shell.tables import plain_table, results, styled
from lowbit.runtime.lab.checks import Finding, State

if TYPE_CHECKING:  # what needs torch, which may be missing
    from lowbit.runtime.engine.stats import Speculated
    from lowbit.runtime.lab.bench import BenchResult
    from lowbit.runtime.lab.bench_prompts import PromptSpeed
    from lowbit.runtime.lab.expected import DrafterDemand, Speed
    from lowbit.runtime.lab.http_load.bench import ServerResult
    from lowbit.runtime.lab.http_load.result import LoadResult, Percentiles
    from lowbit.runtime.lab.listing import Cache, Listed
    from lowbit.runtime.lab.ranks import SharedDemand

MARKS: Mapping[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "missing": ("✗", "bold red"),
}
SLOW = 0.8  # of the expected speed: no model of BENCHMARKS.md is as slow on an H100 or H200
ARBITRARY = "drafts follow a prompt of arbitrary tokens; with real text more or fewer are accepted"
BUSY = 0.8  # share of a core that a process uses, beyond which it may be what limits a load
LATE_S = 0.02  # of a request, beyond which its arrival is no longer that of the process
TOO_MUCH = "!"  # behind the memory of a model that does not fit
ALWAYS = (
    "per token: bytes that are read to make a token",
    "at most: the speed if only that reading took time",
)
EXPECTED = {
    "cuda": "expected: that reading, and the time that layers took beyond it on one H200 "
    "(BENCHMARKS.md); other GPUs may need more or less",
    "cpu": "expected: reading at 40 % of the bandwidth measured now, as on two cores of an AMD "
    "EPYC, and the time of calls measured now",
}
PROMPT = "prompt: reading 512 tokens, by the speed of matrix products measured now"
REST = (
    "share: expected over at most",
    f"memory: weights, the model's context up to {DEFAULT_CONTEXT:,} tokens, and room for "
    "libraries and activations",
)


def show_findings(findings: Sequence[Finding]) -> None:
    """A row for each thing that was looked at."""
    table = plain_table("this machine", ("", "what", "found"))
    for each in findings:
        words = f"{each.found} ({each.hint})" if each.hint else each.found
        table.add_row(styled(MARKS[each.state]), each.what, words)
    results().print(table)


def show_speed(speed: "Speed") -> None:
    """A row for each model."""
    from lowbit.runtime.engine.memory import gigabytes

    name = "this processor" if speed.device == "cpu" else speed.name
    title = f"one answer at a time on {name}, which reads {gigabytes(int(speed.bandwidth))}/s"
    prompts = ("prompt",) if speed.device == "cpu" else ()
    columns = ("per token", "at most", "expected", "share", *prompts, "memory")
    table = plain_table(title, ("model",), columns)
    for each in speed.models:
        memory, prompt = gigabytes(each.memory_bytes), each.prompt_tokens_per_s
        table.add_row(
            each.name,
            gigabytes(each.token_bytes),
            f"{_speed(each.most_tokens_per_s)} tok/s",
            f"{_speed(each.tokens_per_s)} tok/s",
            f"{each.share:.0%}",
            *(() if prompt is None else (f"{_speed(prompt)} tok/s",)),
            styled((f"{memory} {TOO_MUCH}", "yellow")) if each.fits is False else memory,
        )
    console = results()
    console.print(table)
    if any(each.fits is False for each in speed.models):
        console.print(f"{TOO_MUCH} more memory than is free")
    for line in _explained(speed.device):
        console.print(line)
    if any(each.recipe is not None for each in speed.models):
        console.print("weights: INT4, as lowbit-convert makes them and --quantize int4 loads them")
    for each in speed.models:
        if each.drafter is not None:
            console.print(_drafter(each.drafter))
        if each.vision_bytes:
            elsewhere = "; --vision-device cpu takes both of the machine's memory"
            console.print(
                f"images: {gigabytes(each.vision_bytes)} more for the vision tower's weights, and "
                f"room for an image{elsewhere if speed.device != 'cpu' else ''}"
            )


def show_ranks(shared: "SharedDemand") -> None:
    """A row for each rank, and what holds for all."""
    from lowbit.runtime.engine.memory import gigabytes

    title = f"shared by {len(shared.ranks)} processes, a sequence of {shared.context:,} tokens"
    drafts = ("drafts",) if any(each.drafts for each in shared.ranks) else ()
    names = ("weights", "cache", "states", "buffers", *drafts, "memory")
    table = plain_table(title, ("rank",), names)
    for each in shared.ranks:
        beside = (each.drafts,) if drafts else ()
        parts = (each.weights, each.cache, each.states, each.buffers, *beside, each.total)
        table.add_row(str(each.rank), *map(gigabytes, parts))
    console = results()
    console.print(table)
    if shared.fits is False:
        console.print("this is more than what is free")
    if shared.head:
        first, other = map(gigabytes, shared.head[:2])
        console.print(
            f"--speculate mtp or auto: rank 0 drafts, and takes {first} more, others {other} each"
        )
    if shared.vision:
        tower = gigabytes(shared.vision)
        console.print(
            f"images: rank 0 alone takes {tower} more for the vision tower's weights, and room for "
            "an image"
        )
    fitting = ", ".join(map(str, shared.fitting))
    console.print(f"numbers that divide heads, widths and groups: {fitting}")
    console.print(f"with --tensor-parallel {len(shared.ranks)}: {shared.tokens}")
    if shared.refused is not None:
        console.print(shared.refused)


def _explained(device: str) -> tuple[str, ...]:
    """Lines that say what the columns of `show_speed` hold."""
    if device != "cpu":
        return (*ALWAYS, EXPECTED["cuda"], *REST)
    return (*ALWAYS, EXPECTED["cpu"], PROMPT, *REST, "lowbit-run bench MODEL measures speeds")


def _drafter(found: "DrafterDemand") -> str:
    from lowbit.formats.folder_size import size

    return (
        f"drafter {printable(found.name)}: suits the model; blocks of {found.block} tokens, "
        f"{found.layers} layers, reads the outputs of layers {', '.join(map(str, found.reads))}; "
        f"{size(found.weights)} of weights and {size(found.cache_token_bytes)} of BF16 cache a "
        "token, counted in the memory above; how often it is right is not expected but measured: "
        "bench --prompts"
    )


def show_models(models: "Sequence[Listed]", cache: "Cache | None") -> None:
    """A row for each model, and a line for each that is broken."""
    console, cached = results(), () if cache is None else cache.models
    sections = {"folders": models, "cache of the Hub": cached}
    for title, found in sections.items():
        if whole := [each for each in found if each.kind != "broken"]:
            console.print(_models_table(title, whole))
    for each in (*models, *cached):
        if each.problem:
            mark = MARKS["missing" if each.kind == "broken" else "note"]
            console.print(styled(mark, f" {each.name}: {each.problem}"))
    if not any(sections.values()):
        beside = "" if cache is None else " or in the cache of the Hub"
        console.print(f"no models here{beside}; lowbit-run list FOLDER looks elsewhere")
    if cache is not None and cache.others:
        console.print(f"{cache.others} more in {cache.folder}, which lowbit does not run")


def show_bench(name: str, result: "BenchResult") -> None:
    """Show the figures of one model's runs."""
    from lowbit.runtime.engine.memory import gigabytes

    how = "sampled" if result.sampled else "greedy"
    speed = result.decode_tokens_per_s
    rows = [
        ("load", f"{result.load_s:.2f} s"),
        ("load to the first token", f"{result.start_s:.2f} s"),
        (
            f"first token after {result.prompt_tokens} tokens",
            f"{result.first_token_s * 1e3:.1f} ms",
        ),
        (
            f"decode, {result.new_tokens} tokens, {how}",
            f"{speed:.1f} tok/s, {1e6 / speed:.0f} us each",
        ),
        ("weights", gigabytes(result.weight_bytes)),
        (f"{result.kv_cache} cache for {result.context} tokens", gigabytes(result.cache_bytes)),
        ("peak memory", gigabytes(result.peak_bytes)),
    ]
    if result.activations != "exact":
        rows.append(("activations", result.activations))
    if result.extra_bytes is not None:
        rows.append(("beyond weights and cache", gigabytes(result.extra_bytes)))
    if result.speculation is not None:
        rows += [
            ("tokens a round", _rounds(result.speculation)),
            ("drafts accepted by position", _accepted(result.speculation)),
        ]
    if result.speculation_factor is not None:
        rows.append(("against off, in turn", f"x {result.speculation_factor:.2f}"))
    each = "token" if result.speculation is None else "plain step"
    rows += [
        (f"read per {each}", gigabytes(result.step_bytes)),
        ("read bandwidth", f"{gigabytes(int(result.bandwidth))}/s"),
        (
            "share of the roofline",
            f"{_percent(result.roofline_share)} of what the read bandwidth allows",
        ),
    ]
    if result.device != "cpu":
        rows.append(("expected of this GPU", f"{result.expected_tokens_per_s:.0f} tok/s"))
    table = plain_table(f"{name} on {result.device}", ("what", "measured"))
    for row in rows:
        table.add_row(*row)
    results().print(table)
    if result.speculation is not None:
        results().print(ARBITRARY)
    elif result.device != "cpu" and speed < SLOW * result.expected_tokens_per_s:
        results().print(f"slower than expected: `lowbit-run tune {name}` may find better launches")


def show_prompts(title: str, speeds: "Sequence[PromptSpeed]") -> None:
    """A row for each prompt, and for all of them."""
    columns = ("tokens", "tokens a round", "tok/s", "off", "against off")
    table = plain_table(title, ("prompt",), columns)
    for each in speeds:
        table.add_row(
            "all" if each.id is None else printable(str(each.id)),
            f"{each.tokens:,}",
            "" if each.speculation is None else _tokens_a_round(each.speculation),
            f"{each.tokens_per_s:,.1f}",
            f"{each.plain_tokens_per_s:,.1f}",
            f"x {each.factor:.2f}",
        )
    results().print(table)


def show_server(result: "ServerResult") -> None:
    """A column for each load, and a line for each thing that spoils its figures."""
    from lowbit.runtime.lab.http_load.clients import load_title

    titles = [load_title(each.clients, each.rate) for each in result.loads]
    table = plain_table(f"{result.model} at {result.url}", ("p50 / p95 / p99",), titles)
    for label, cells in _server_rows(result).items():
        table.add_row(label, *cells)
    console = results()
    console.print(table)
    for title, load in zip(titles, result.loads, strict=True):
        for text in _reservations(load, result.new_tokens):
            console.print(f"{title}: {text}")


def _server_rows(result: "ServerResult") -> dict[str, list[str]]:
    """Cells of each row."""
    loads = result.loads
    rows = {
        "prompt tokens": [
            "" if each.prompt_tokens is None else f"{each.prompt_tokens:,.0f}" for each in loads
        ],
        "answered": [f"{each.answered:,} of {each.requests:,}" for each in loads],
        f"output, {result.new_tokens:,} tokens each": [
            f"{each.output_tokens_per_s:,.1f} tok/s" for each in loads
        ],
        "requests": [f"{each.requests_per_s:,.2f}/s" for each in loads],
        "within the limits": [
            "" if each.goodput_per_s is None else f"{each.goodput_per_s:,.2f}/s" for each in loads
        ],
        "first token, ms": [_milliseconds(each.first_token_s) for each in loads],
        "between tokens, ms": [_milliseconds(each.between_tokens_s) for each in loads],
        "between events, ms": [_milliseconds(each.between_events_s) for each in loads],
        "whole answer, ms": [_milliseconds(each.whole_s) for each in loads],
    }
    return {label: cells for label, cells in rows.items() if any(cells)}


def _reservations(load: "LoadResult", new_tokens: int) -> list[str]:
    """Lines on what spoils the figures of a load."""
    lines = [f"{each.count:,} failed: {each.message}" for each in load.failures]
    if load.short:
        lines.append(f"{load.short:,} answers have fewer than {new_tokens:,} tokens")
    if load.counted_events:
        lines.append("the server does not count tokens; each event with text counts as one")
    if load.held:
        lines.append(f"{load.held:,} requests waited, since {load.most_at_once:,} were under way")
    if load.most_late_s > LATE_S:
        lines.append(f"requests were asked up to {load.most_late_s * 1e3:.0f} ms late")
    if load.busy_share > BUSY:
        share = _percent(load.busy_share)
        lines.append(f"this process computed for {share} of the time and may be the slower side")
    return lines


def _milliseconds(found: "Percentiles | None") -> str:
    """Percentiles with three digits at least."""
    if found is None:
        return ""
    figures = (found.p50 * 1e3, found.p95 * 1e3, found.p99 * 1e3)
    digits = 2 if figures[0] < 10 else 1 if figures[0] < 100 else 0
    return " / ".join(f"{figure:,.{digits}f}" for figure in figures)


def _models_table(title: str, models: "Sequence[Listed]") -> Table:
    from lowbit.formats.folder_size import size

    columns = ("model", "weights", "verdict")
    table = plain_table(title, columns, ("KL", "bits", "size", "date"))
    for each in models:
        judged, bits = each.judgement, each.bits_per_weight
        verdict = "" if judged is None else judged.title
        if judged is not None and not judged.current:
            verdict = "of an earlier conversion"
        known = judged is not None and judged.current and judged.kl_mean is not None
        table.add_row(
            each.name,
            each.recipe or "",
            verdict,
            f"{judged.kl_mean:#.3g}" if known and judged is not None else "",
            "" if bits is None else f"{bits:.2f}",
            size(each.size_bytes),
            each.date or "",
        )
    return table


def _speed(tokens_per_s: float) -> str:
    """Two digits: more are not known."""
    digits = 1 if tokens_per_s < 10 else 0
    rounded = float(f"{tokens_per_s:.2g}")
    return f"{rounded:,.{digits}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tokens_a_round(found: "Speculated") -> str:
    return "no rounds" if found.tokens_a_round is None else f"{found.tokens_a_round:.2f}"


def _rounds(found: "Speculated") -> str:
    if found.tokens_a_round is None:
        return _tokens_a_round(found)
    return f"{_tokens_a_round(found)} in {found.rounds:,} round{'s' if found.rounds > 1 else ''}"


def _accepted(found: "Speculated") -> str:
    counts = zip(found.accepted, found.drafted, strict=True)
    return " ".join(_percent(right / drafted) for right, drafted in counts) or "no drafts"

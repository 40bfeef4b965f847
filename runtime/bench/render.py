"""Measured speed as tables on stdout."""

from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.bench.bench import BenchResult
from lowbit.runtime.bench.profiling import KernelTime, Profile, Reads
from lowbit.runtime.bench.sweep import Axis, Sweep
from lowbit.runtime.engine.memory import gigabytes
from lowbit.runtime.engine.stats import Speculated

READS: dict[Reads, str] = {
    "weights": "weights",
    "kv": "keys and values",
    "states": "states of linear layers",
    "other": "other",
}
AXES: dict[Axis, str] = {"context": "context", "group_size": "group", "batch": "sequences"}
LEAST_SHARE = 0.005  # kernels below it are one row
NUMBERS_WIDTH = 60  # of the columns beside a kernel's name
LEAST_NAME = 20
SLOW = 0.8  # of the expected speed: no model of BENCHMARKS.md is as slow on an H100 or H200
WITHOUT_MEANING = (
    "drafts follow a prompt of arbitrary tokens; with real text more or fewer are accepted"
)


def show_result(name: str, result: BenchResult) -> None:
    """One run's figures."""
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
        ("read bandwidth", _rate(result.bandwidth)),
        (
            "share of the roofline",
            f"{_percent(result.roofline_share)} of read bandwidth / bytes per {each}",
        ),
    ]
    if result.device != "cpu":
        rows.append(("expected of this GPU", f"{result.expected_tokens_per_s:.0f} tok/s"))
    table = plain_table(f"{name} on {result.device}", ("what", "measured"))
    for row in rows:
        table.add_row(*row)
    results().print(table)
    if result.speculation is not None:
        results().print(WITHOUT_MEANING)
    elif result.device != "cpu" and speed < SLOW * result.expected_tokens_per_s:
        results().print(f"slower than expected: `lowbit-run tune {name}` may find better launches")


def show_sweep(name: str, sweep: Sweep) -> None:
    """A row for each point."""
    how = "sampled" if sweep.sampled else "greedy"
    title = f"{name} on {sweep.device}, {sweep.new_tokens} tokens, {how}, {sweep.kv_cache} cache"
    drafts = any(each.speculation is not None for each in sweep.points)
    step = "us/token" if drafts else "us/step"
    columns = [AXES[sweep.over], "tok/s", step, "per step", "roofline"]
    batched, cached = sweep.over == "batch", sweep.over == "context"
    columns += ["against the first"] if batched else ["first token"]
    columns += ["KV read at"] if cached else []
    columns += ["tokens/round", "against off"] if drafts else []
    table = plain_table(title, columns[:1], columns[1:])
    for each in sweep.points:
        first = 0.0 if each.first_token_s is None else each.first_token_s
        row = [str(each.at), f"{each.tokens_per_s:.1f}", f"{each.us_per_step:.0f}"]
        row += [gigabytes(each.step_bytes), _percent(each.roofline_share)]
        row += [f"x {each.relative:.2f}" if batched else f"{first * 1e3:.1f} ms"]
        row += [_rate(each.kv_bytes_per_s)] if cached else []
        if each.speculation is not None and each.speculation_factor is not None:
            row += [_rounds(each.speculation), f"x {each.speculation_factor:.2f}"]
        table.add_row(*row)
    console = results()
    console.print(table)
    console.print(f"read bandwidth {_rate(sweep.bandwidth)}")
    if drafts:
        console.print(WITHOUT_MEANING)


def show_profile(profile: Profile, result: BenchResult) -> None:
    """A row for each kernel, then for each kind of bytes, then for the whole step."""
    console = results()
    title = f"{profile.steps} decode steps under the profiler"
    figures = ("calls", "us/call", "us/token", "share", "bandwidth")
    table = plain_table(title, ("kernel",), figures)
    width = max(LEAST_NAME, console.width - NUMBERS_WIDTH)
    shown = [each for each in profile.kernels if each.share >= LEAST_SHARE]
    for each in shown:
        numbers = f"{each.calls_per_token:g}", f"{each.us_per_call:.2f}", f"{each.us_per_token:.1f}"
        table.add_row(_label(each, width), *numbers, _percent(each.share), "")
    if rest := profile.kernels[len(shown) :]:
        us, share = sum(each.us_per_token for each in rest), sum(each.share for each in rest)
        calls = sum(each.calls_per_token for each in rest)
        table.add_row(f"{len(rest)} more", f"{calls:g}", "", f"{us:.1f}", _percent(share), "")
    table.add_section()
    for kind in profile.reads:
        us, share = kind.us_per_token, kind.share
        rate = _rate(kind.bytes_per_s)
        table.add_row(READS[kind.reads], "", "", f"{us:.1f}", _percent(share), rate)
    table.add_section()
    table.add_row("all kernels", "", "", f"{profile.kernel_us_per_token:.1f}", _percent(1.0), "")
    whole = 1 / result.decode_tokens_per_s
    rate = _rate(result.step_bytes / whole)
    table.add_row("a token, not profiled", "", "", f"{whole * 1e6:.1f}", "", rate)
    console.print(table)


def _label(kernel: KernelTime, width: int) -> str:
    """Name, cut to the width, and grid."""
    name = kernel.name.removeprefix("void ")
    grid = "" if kernel.grid is None else " " + "x".join(map(str, kernel.grid))
    room = width - len(grid)
    return (name if len(name) <= room else name[: room - 1] + "…") + grid


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{gigabytes(int(bytes_per_s))}/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rounds(found: Speculated) -> str:
    """Tokens a round, and the number of rounds."""
    if found.tokens_a_round is None:
        return "no rounds"
    return f"{found.tokens_a_round:.2f} in {found.rounds:,} round{'s' if found.rounds > 1 else ''}"


def _accepted(found: Speculated) -> str:
    """Accepted share of the drafts of each position."""
    counts = zip(found.accepted, found.drafted, strict=True)
    return " ".join(_percent(right / drafted) for right, drafted in counts) or "no drafts"

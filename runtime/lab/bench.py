"""Speed and memory of a model on this machine, against the bandwidth of its memory."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from lowbit.formats.activation_modes import Activations
from lowbit.formats.architectures import part_of
from lowbit.formats.errors import RequestError
from lowbit.formats.machine.memory import peak_resident_bytes
from lowbit.runtime.engine.chunks import new_chunks
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Speculated, Tally
from lowbit.runtime.lab.bench_settings import BenchSettings
from lowbit.runtime.lab.machine_speed import (
    expected_step_s,
    read_bandwidth,
    seconds_beside_read,
    settle,
)
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.sampling_params import SamplingParams

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=0)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run, of one sequence or of several together."""

    first_token_s: float  # from its start to the first token of every sequence
    decode_s: float  # from there to its last token
    tokens: int  # of all sequences, that came in `decode_s`
    speculation: Speculated | None = None  # its drafts; None where speculation is off

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first ones."""
        return self.tokens / self.decode_s


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the runs of one sequence after the first, which warms up."""

    cold_first_token_s: float  # first-token time of the first run
    first_token_s: float  # see `TimedRun`
    tokens_per_s: float  # over the tokens after the first
    # drafts of the runs after the first; None where speculation is off
    speculation: Speculated | None = None
    speculation_factor: float | None = None  # see `in_turn`


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step must move, without drafts and their model."""

    weights: int  # read; an untied embedding is read one row at a time and not counted
    kv: int  # keys and values that are read
    states: int  # of linear layers, read and written

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.states


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Figures of a measured model."""

    device: str
    context: int
    prompt_tokens: int
    new_tokens: int
    sampled: bool  # tokens were drawn by `SAMPLED`; else the likeliest were taken
    load_s: float  # folder to model in memory
    # from the beginning of the load to the first token of the first request, without the wait
    # between the two; cold only where the model had not run before
    start_s: float
    first_token_s: float  # median time of the prompt and the first token
    decode_tokens_per_s: float  # median over the runs, batch 1
    weight_bytes: int  # memory of the weights
    cache_bytes: int  # memory of keys, values and the states of linear layers
    kv_cache: str  # type of keys and values: bf16, int8 or fp32
    activations: Activations  # inputs of quantized linears
    # most memory in use: of the GPU from the end of loading on, or resident in this process on a
    # CPU
    peak_bytes: int
    # graphs and scratch: the peak without weights, cache and the allocator's rounding; None on a
    # CPU, where it would be mostly the interpreter and the libraries
    extra_bytes: int | None
    step_bytes: int  # moved by one plain step at the middle of the run, see `StepBytes`
    bandwidth: float  # bytes per second that a plain read of a large buffer reaches here
    # of the tokens per second that `bandwidth` would allow, a step for each. A model that fits the
    # processor's cache can exceed 1, speculation too.
    roofline_share: float
    expected_tokens_per_s: float  # a step for each, as long as `expected_step_s` says
    # drafts of the timed runs; None where speculation is off. They follow a prompt without a
    # meaning; real text may have other shares accepted.
    speculation: Speculated | None = None
    # decode speed against runs without drafts, which took turns with these; None where speculation
    # is off
    speculation_factor: float | None = None


def bench(model: Model, settings: BenchSettings) -> BenchResult:
    """Time runs over an arbitrary prompt, after one run to warm up.

    Args:
        model: loaded; the conversations in its cache are dropped.

    Raises:
        RequestError: the run does not fit the context.
    """
    rounding = forget_peak(model.device)
    speed = measure_speed(model, settings)
    opened, dtype = model.opened, model.dtype
    weights = opened.weight_bytes(model.device, dtype)
    cache = model.engine.runner.cache_bytes
    step = step_bytes(model, settings.middle).total
    peak = peak_bytes(model.device)  # before the buffer that measures the bandwidth
    bandwidth = read_bandwidth(model.device)
    layer_s = seconds_beside_read(model.device, opened.config.experts is not None)
    layers = opened.config.num_hidden_layers
    expected_s = expected_step_s(step, layers, layer_s, model.device, bandwidth)
    return BenchResult(
        device=device_name(model.device),
        context=model.context,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        sampled=settings.sampled,
        load_s=model.load_s,
        start_s=model.load_s + speed.cold_first_token_s,
        first_token_s=speed.first_token_s,
        decode_tokens_per_s=speed.tokens_per_s,
        weight_bytes=weights,
        cache_bytes=cache,
        kv_cache=model.kv_cache.cache_type.name,
        activations=model.options.activations,
        peak_bytes=peak,
        extra_bytes=peak - rounding - weights - cache if model.device == "cuda" else None,
        step_bytes=step,
        bandwidth=bandwidth,
        roofline_share=speed.tokens_per_s * step / bandwidth,
        expected_tokens_per_s=1 / expected_s,
        speculation=speed.speculation,
        speculation_factor=speed.speculation_factor,
    )


def measure_speed(model: Model, settings: BenchSettings) -> Speed:
    """Times of the runs after one to warm up; errors as in `bench`."""
    check_fits(model, settings)
    runs, factor = in_turn(model, settings.runs, lambda: timed_run(model, settings))
    cold, *timed = runs
    return Speed(
        cold_first_token_s=cold.first_token_s,
        first_token_s=statistics.median(run.first_token_s for run in timed),
        tokens_per_s=statistics.median(run.tokens_per_s for run in timed),
        speculation=summed(run.speculation for run in timed),
        speculation_factor=factor,
    )


def check_fits(model: Model, settings: BenchSettings) -> None:
    """Refuse a run that is longer than the context.

    Raises:
        RequestError: it is.
    """
    if settings.tokens > model.context:
        raise RequestError(
            f"{settings.prompt_tokens} + {settings.new_tokens} tokens do not fit the context of "
            f"{model.context}",
            hint=model.engine.limits.advice(settings.tokens) or "ask for fewer tokens",
        )


def arbitrary_prompt(model: Model, tokens: int, first: int = 0) -> list[int]:
    """`tokens` arbitrary ids, the same every time; another `first` gives others."""
    return [(7 * index + first) % model.engine.runner.sampler.vocabulary for index in range(tokens)]


def step_bytes(model: Model, tokens: int, batch: int = 1) -> StepBytes:
    """Bytes that a step of `batch` sequences moves, each with `tokens` in the cache.

    Experts count as often as they are hit on average, all of them equally likely.
    """
    state = model.engine.runner.state
    return StepBytes(
        weights=read_weights(model.opened, model.device, model.dtype, batch),
        kv=batch * tokens * model.opened.config.kv_layers * state.pages.token_bytes,
        states=batch * 2 * state.slots.slot_bytes,
    )


def read_weights(opened: OpenedModel, device: str, dtype: torch.dtype, batch: int = 1) -> int:
    """Bytes of weights that a step of `batch` sequences reads; see `step_bytes`."""
    trunk, config = _trunk(opened), opened.config
    unread = trunk.unread_embedding_bytes(device, dtype)
    if config.experts is not None:
        missed = (1 - config.experts.chosen / config.experts.count) ** batch
        unread += round(trunk.expert_bytes(device, dtype) * missed)
    return trunk.weight_bytes(device, dtype) - unread


def forget_peak(device: str) -> int:
    """Count a GPU's peak from here on; loading holds a linear twice while it is rearranged.

    Returns:
        Bytes that the allocator holds beyond those that were asked for.
    """
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def peak_bytes(device: str) -> int:
    """Peak memory of this process: of the GPU's allocator, or resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return peak_resident_bytes()


def device_name(device: str) -> str:
    """The name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def summed(found: Iterable[Speculated | None]) -> Speculated | None:
    """Drafts of several runs together; None where speculation is off."""
    total, counted = Tally(), [each for each in found if each is not None]
    for each in counted:
        total.add(each)
    return total.speculated if counted else None


@contextmanager
def plain_steps(engine: Engine, graphs: Graphs) -> Iterator[None]:
    """Decode what is inside without drafts, as if the model had been loaded with `off`.

    Args:
        engine: without requests.
        graphs: of such steps, which leave nothing for the MTP head or a drafter.
    """
    runner = engine.runner
    before = engine.drafting, runner.hidden_ring, runner.graphs, runner.blocks, runner.chunks
    engine.drafting, runner.hidden_ring, runner.graphs, runner.blocks = None, None, graphs, None
    if before[3] is not None:  # recorded chunks show their states to the drafter
        runner.chunks = new_chunks(runner.decoder, runner.each_layer, runner.tables, graphs)
    try:
        yield
    finally:
        engine.drafting, runner.hidden_ring, runner.graphs, runner.blocks, runner.chunks = before


def in_turn(
    model: Model, runs: int, run: Callable[[], TimedRun]
) -> tuple[list[TimedRun], float | None]:
    """Runs, one more to warm up first, each behind one without drafts if the model speculates.

    Returns:
        The runs, and the median of their tokens per second against those without drafts; None
        where speculation is off.
    """
    found, plain, graphs = [], [], Graphs(model.engine.runner.graphs)
    for _ in range(1 + runs):
        if model.engine.drafting is not None:
            with plain_steps(model.engine, graphs):
                plain.append(run().tokens_per_s)
        found.append(run())
    if not plain:
        return found, None
    rates = statistics.median(each.tokens_per_s for each in found[1:])
    return found, rates / statistics.median(plain[1:])


def _trunk(opened: OpenedModel) -> OpenedModel:
    """The model without MTP head and drafter."""
    config = opened.checkpoint.config
    specs = tuple(spec for spec in opened.specs if part_of(config, spec.name) == "decoder")
    return replace(opened, specs=specs, head=False, draft=None, drafter=None)


def timed_run(model: Model, settings: BenchSettings) -> TimedRun:
    """A run of one sequence; tokens of the same step as the first one are not timed.

    Raises:
        RequestError: all tokens came in one step.
    """
    prompt = arbitrary_prompt(model, settings.prompt_tokens)
    request = Request(tuple(prompt), choice_of(settings), settings.new_tokens)
    return timed_answer(model, request)


def timed_answer(model: Model, request: Request) -> TimedRun:
    """A run of one request; see `timed_run`."""
    model.engine.forget()
    settle(model.device)
    started = time.perf_counter()
    tokens = model.engine.submit(request)
    next(tokens)
    first = time.perf_counter()
    beside = len(tokens.poll())
    timed = sum(1 for _ in tokens)
    seconds = time.perf_counter() - first
    if timed == 0:
        raise RequestError(
            f"all {1 + beside} tokens came in one step", hint="ask for more --new-tokens"
        )
    return TimedRun(first - started, seconds, timed, tokens.speculation)


def choice_of(settings: BenchSettings) -> SamplingParams:
    """Sampling parameters of a run."""
    return SAMPLED if settings.sampled else GREEDY

"""How fast a model runs here, and how far that is from what the memory allows."""

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit.formats.architectures import part_of
from lowbit.formats.errors import RequestError
from lowbit.formats.machine.free_memory import free_bytes
from lowbit.runtime.bench.defaults import NEW_TOKENS, PROMPT_TOKENS, RUNS
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.stats import Speculated, Tally
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.models.loader import OpenedModel
from lowbit.runtime.state.sampler import SamplingParams
from lowbit.runtime.thresholds import EXACT_TOKENS

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=0)
BANDWIDTH_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
SUMS = 5  # timed together, so that the launch of one is not counted against the memory


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of some runs of one length; medians over those after the first.

    Attributes:
        cold_first_token_s: of the first run, from its start to its first token.
        first_token_s: from the start of a run to its first token.
        tokens_per_s: over the tokens after the first.
        speculation: drafts of the runs after the first; None where speculation is off.
    """

    cold_first_token_s: float
    first_token_s: float
    tokens_per_s: float
    speculation: Speculated | None = None


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Speed of several sequences together.

    Attributes:
        tokens_per_s: of all sequences.
        speculation: drafts of all sequences; None where speculation is off.
    """

    tokens_per_s: float
    speculation: Speculated | None = None


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run.

    Attributes:
        first_token_s: from its start to its first token.
        decode_s: from there to its last token.
        tokens: that came in that time.
        speculation: its drafts; None where speculation is off.
    """

    first_token_s: float
    decode_s: float
    tokens: int
    speculation: Speculated | None = None


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one decode step must move, in bytes.

    Attributes:
        weights: read; of an untied embedding nothing but a row.
        kv: keys and values that are read.
        states: of linear layers, read and written.
    """

    weights: int
    kv: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.states


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured.

    Attributes:
        sampled: whether tokens were sampled by `SAMPLED` rather than the likeliest taken.
        load_s: folder to model in memory.
        start_s: from the beginning of the load to the first token of the first request, waiting
            between the two left out; cold only where the model had not run before.
        first_token_s: median time of the prompt and the first token.
        decode_tokens_per_s: median over the runs, batch 1.
        weight_bytes: memory the weights take.
        cache_bytes: memory that keys, values and the states of linear layers take.
        peak_bytes: most memory in use: of the GPU from the end of loading on, or resident in this
            process on a CPU.
        extra_bytes: of it, what is neither weights nor cache, nor what the allocator has rounded
            them up by: graphs and scratch; None on a CPU, where the interpreter and the libraries
            are most of that.
        step_bytes: what one step must move at the middle of the run, see `StepBytes`; without
            drafts and what makes them.
        bandwidth: bytes per second that a plain read of a large buffer reaches here.
        roofline_share: of the tokens per second that `bandwidth` would allow, a step for each. A
            model that fits the processor's cache can exceed 1, speculation too.
        speculation: drafts of the timed runs; None where speculation is off. They follow a prompt
            without a meaning, so that real text may have other shares accepted.
    """

    device: str
    context: int
    prompt_tokens: int
    new_tokens: int
    sampled: bool
    load_s: float
    start_s: float
    first_token_s: float
    decode_tokens_per_s: float
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int
    extra_bytes: int | None
    step_bytes: int
    bandwidth: float
    roofline_share: float
    speculation: Speculated | None = None


def bench(
    model: Model,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    runs: int = RUNS,
    sampled: bool = False,
) -> BenchResult:
    """Time runs over an arbitrary prompt, after one run to warm up.

    Args:
        model: loaded; whatever it held is dropped.
        prompt_tokens: length of the prompt.
        new_tokens: decoded in each run, at least 2; stop tokens are ignored.
        runs: of which the median counts.
        sampled: with `SAMPLED` instead of greedy.

    Raises:
        RequestError: the run does not fit the context.
    """
    rounding = forget_peak(model.device)
    speed = measure_speed(model, prompt_tokens, new_tokens, runs, sampled)
    opened, dtype = model.opened, model.dtype
    weights = opened.weight_bytes(model.device, dtype)
    cache = model.engine.runner.cache_bytes
    step = step_bytes(model, prompt_tokens + new_tokens // 2).total
    peak = peak_bytes(model.device)  # before the buffer that measures the bandwidth
    bandwidth = read_bandwidth(model.device)
    return BenchResult(
        device=device_name(model.device),
        context=model.context,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        sampled=sampled,
        load_s=model.load_s,
        start_s=model.load_s + speed.cold_first_token_s,
        first_token_s=speed.first_token_s,
        decode_tokens_per_s=speed.tokens_per_s,
        weight_bytes=weights,
        cache_bytes=cache,
        peak_bytes=peak,
        extra_bytes=peak - rounding - weights - cache if model.device == "cuda" else None,
        step_bytes=step,
        bandwidth=bandwidth,
        roofline_share=speed.tokens_per_s * step / bandwidth,
        speculation=speed.speculation,
    )


def measure_speed(
    model: Model, prompt_tokens: int, new_tokens: int, runs: int, sampled: bool = False
) -> Speed:
    """Times of `runs` runs after one to warm up; arguments and errors as in `bench`."""
    check_fits(model, prompt_tokens, new_tokens)
    params = SAMPLED if sampled else GREEDY
    prompt = arbitrary_prompt(model, prompt_tokens)
    cold, *timed = [_run(model, prompt, new_tokens, params) for _ in range(runs + 1)]
    return Speed(
        cold_first_token_s=cold.first_token_s,
        first_token_s=statistics.median(run.first_token_s for run in timed),
        tokens_per_s=statistics.median(run.tokens / run.decode_s for run in timed),
        speculation=summed(run.speculation for run in timed),
    )


def batched_speed(model: Model, batch: int, prompt_tokens: int, new_tokens: int) -> BatchSpeed:
    """Tokens per second of `batch` sequences decoded together, greedy, in one run.

    Args:
        model: loaded; whatever it held is dropped.
        batch: sequences, each with an own prompt.
        prompt_tokens: length of each prompt.
        new_tokens: decoded in each sequence, at least 2; the first of each is not timed. With
            speculation on the average of all sequences, as long as all of them run.

    Raises:
        RequestError: the run does not fit the context, or the model has room for fewer sequences.
    """
    check_fits(model, prompt_tokens, new_tokens)
    check_sequences(model, batch)
    prompts = [arbitrary_prompt(model, prompt_tokens, index) for index in range(batch)]
    return _run_together(model, prompts, new_tokens)


def check_sequences(model: Model, batch: int) -> None:
    """Refuse more sequences than the model has room for.

    Raises:
        RequestError: there are.
    """
    if not 1 <= batch <= model.cache.sequences:
        raise RequestError(
            f"{batch} sequences cannot be decoded together",
            hint=f"1 to {model.cache.sequences} can",
        )


def check_fits(model: Model, prompt_tokens: int, new_tokens: int) -> None:
    """Refuse a run that is longer than the context.

    Raises:
        RequestError: it is.
    """
    needed = prompt_tokens + new_tokens - 1
    if needed > model.context:
        raise RequestError(
            f"{prompt_tokens} + {new_tokens} tokens do not fit the context of {model.context}",
            hint=model.engine.limits.advice(needed) or "ask for fewer tokens",
        )


def arbitrary_prompt(model: Model, tokens: int, first: int = 0) -> list[int]:
    """So many token ids without a meaning, the same ones every time; others for another first."""
    return [(7 * index + first) % model.engine.runner.sampler.vocabulary for index in range(tokens)]


def step_bytes(model: Model, tokens: int, batch: int = 1) -> StepBytes:
    """What a step of `batch` sequences moves, with so many tokens in the cache of each.

    Of experts those count that are hit on average, if each is as likely as another.
    """
    opened, dtype, config = _trunk(model.opened), model.dtype, model.opened.config
    unread = 0  # an untied embedding is read one row at a time
    if not config.tie_word_embeddings:
        unread = config.vocab_size * config.hidden_size * dtype.itemsize
    if config.experts is not None:
        missed = (1 - config.experts.chosen / config.experts.count) ** batch
        unread += round(opened.expert_bytes(model.device, dtype) * missed)
    state = model.engine.runner.state
    return StepBytes(
        weights=opened.weight_bytes(model.device, dtype) - unread,
        kv=batch * tokens * config.kv_layers * state.pages.token_bytes,
        states=batch * 2 * state.slots.slot_bytes,
    )


def read_bandwidth(device: str, repeats: int = 5) -> float:
    """Bytes per second of the fastest of some sums over a buffer larger than any cache."""
    size, free = BANDWIDTH_BYTES[device], free_bytes(device)
    if free is not None:
        size = min(size, free // 2)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        settle(device)
        started = time.perf_counter()
        for _ in range(SUMS):
            buffer.sum()
        settle(device)
        best = min(best, time.perf_counter() - started)
    return SUMS * buffer.nbytes / best


def forget_peak(device: str) -> int:
    """Count a GPU's peak from here on; loading holds a linear twice while it is rearranged.

    Returns:
        What the allocator holds beyond what was asked for, in bytes.
    """
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def peak_bytes(device: str) -> int:
    """Most memory this process has used: of the GPU's allocator, or resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: str) -> str:
    """The name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def settle(device: str) -> None:
    """Wait until a GPU has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def summed(found: Iterable[Speculated | None]) -> Speculated | None:
    """Drafts of several runs together; None where speculation is off."""
    total, counted = Tally(), [each for each in found if each is not None]
    for each in counted:
        total.add(each)
    return total.speculated if counted else None


def tokens_before(batch: int, speculation: bool) -> int:
    """Tokens that a sequence of a batch may get while the prompts of others run, at most.

    With speculation a step of n sequences gives each EXACT_TOKENS / n tokens or one.
    """
    if not speculation:
        return batch
    return sum(max(1, EXACT_TOKENS // running) for running in range(1, batch + 1))


def _trunk(opened: OpenedModel) -> OpenedModel:
    """The model without its head for multi-token prediction, and without a drafter."""
    config = opened.checkpoint.config
    specs = tuple(spec for spec in opened.specs if part_of(config, spec.name) == "decoder")
    return replace(opened, specs=specs, head=False, draft=None, drafter=None)


def _run(model: Model, prompt: Sequence[int], new_tokens: int, params: SamplingParams) -> TimedRun:
    """A run whose tokens are timed but for the first, and those of the same step."""
    model.engine.forget()
    settle(model.device)
    started = time.perf_counter()
    tokens = model.engine.generate(prompt, params, new_tokens)
    next(tokens)
    first = time.perf_counter()
    timed = new_tokens - 1 - len(tokens.poll())
    if timed == 0:
        raise RequestError(
            f"all {new_tokens} tokens came in one step", hint="ask for more --new-tokens"
        )
    for _ in tokens:
        pass
    return TimedRun(first - started, time.perf_counter() - first, timed, tokens.speculation)


def _run_together(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> BatchSpeed:
    """Speed from the first token of every sequence on.

    Prompts are run one after the other, so the first sequences are given more tokens: those that
    they decode while the others' prompts run.
    """
    engine = model.engine
    engine.forget()
    extra = tokens_before(len(prompts), engine.drafting is not None)
    handles = [engine.generate(prompt, GREEDY, new_tokens + extra) for prompt in prompts]
    while not all(handle.begun for handle in handles):
        engine.step()
    _take(handles)
    settle(model.device)
    started, tokens, wanted = time.perf_counter(), 0, len(prompts) * (new_tokens - 1)
    while tokens < wanted and not any(handle.ended for handle in handles):
        engine.step()
        tokens += _take(handles)
    settle(model.device)
    seconds = time.perf_counter() - started
    found = summed(handle.speculation for handle in handles)
    for handle in handles:
        handle.cancel()
    engine.step()
    return BatchSpeed(tokens / seconds, found)


def _take(handles: Sequence[Handle]) -> int:
    """Number of tokens that have come since the last time."""
    return sum(len(handle.poll()) for handle in handles)

"""How fast a model runs here, and how far that is from what the memory allows."""

import statistics
import sys
import time
from dataclasses import dataclass

import torch

from lowbit.formats.errors import RequestError
from lowbit.formats.free_memory import free_bytes
from lowbit.runtime.model import Model
from lowbit.runtime.sampling import SamplingParams

BANDWIDTH_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
SUMS = 5  # timed together, so that the launch of one is not counted against the memory


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured.

    Attributes:
        load_s: folder to model in memory.
        first_token_s: median time of the prompt and the first token.
        decode_tokens_per_s: median over the runs, greedy, batch 1.
        weight_bytes: memory the weights take.
        cache_bytes: memory that keys, values and the states of linear layers take.
        peak_bytes: most memory in use: of the GPU, or resident in this process on a CPU.
        step_bytes: what one step must read: weights, and the cache at the middle of the run; the
            states of linear layers are written too.
        bandwidth: bytes per second that a plain read of a large buffer reaches here.
        roofline_share: of the tokens per second that `bandwidth` would allow. A model that fits
            the processor's cache can exceed 1.
    """

    device: str
    context: int
    prompt_tokens: int
    new_tokens: int
    load_s: float
    first_token_s: float
    decode_tokens_per_s: float
    weight_bytes: int
    cache_bytes: int
    peak_bytes: int
    step_bytes: int
    bandwidth: float
    roofline_share: float


def bench(
    model: Model, prompt_tokens: int = 128, new_tokens: int = 128, runs: int = 3
) -> BenchResult:
    """Time greedy runs over an arbitrary prompt, after one run to warm up.

    Args:
        model: loaded; whatever it held is dropped.
        prompt_tokens: length of the prompt.
        new_tokens: decoded in each run, at least 2; stop tokens are ignored.
        runs: of which the median counts.

    Raises:
        RequestError: the run does not fit the context.
    """
    if prompt_tokens + new_tokens - 1 > model.context:
        raise RequestError(
            f"{prompt_tokens} + {new_tokens} tokens do not fit the context of {model.context}"
        )
    prompt = [7 * index % model.tokenizer.vocabulary for index in range(prompt_tokens)]
    timed = [_run(model, prompt, new_tokens) for _ in range(runs + 1)][1:]
    first = statistics.median(first for first, _ in timed)
    speed = statistics.median((new_tokens - 1) / decode for _, decode in timed)
    config = model.opened.config
    opened, dtype = model.opened, model.dtype
    weights = opened.weight_bytes(model.device, dtype)
    gathered = 0  # an untied embedding is read one row at a time
    if not config.tie_word_embeddings:
        gathered = config.vocab_size * config.hidden_size * model.dtype.itemsize
    middle = prompt_tokens + new_tokens // 2
    state = opened.state_bytes(dtype)
    step = weights - gathered + opened.kv_bytes(middle, dtype) + 2 * state  # read and written
    peak = peak_bytes(model.device)  # before the buffer that measures the bandwidth
    bandwidth = read_bandwidth(model.device)
    return BenchResult(
        device=torch.cuda.get_device_name() if model.device == "cuda" else "cpu",
        context=model.context,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        load_s=model.load_s,
        first_token_s=first,
        decode_tokens_per_s=speed,
        weight_bytes=weights,
        cache_bytes=opened.kv_bytes(model.context, dtype) + 2 * state,
        peak_bytes=peak,
        step_bytes=step,
        bandwidth=bandwidth,
        roofline_share=speed * step / bandwidth,
    )


def read_bandwidth(device: str, repeats: int = 5) -> float:
    """Bytes per second of the fastest of some sums over a buffer larger than any cache."""
    size, free = BANDWIDTH_BYTES[device], free_bytes(device)
    if free is not None:
        size = min(size, free // 2)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        _settle(device)
        started = time.perf_counter()
        for _ in range(SUMS):
            buffer.sum()
        _settle(device)
        best = min(best, time.perf_counter() - started)
    return SUMS * buffer.nbytes / best


def peak_bytes(device: str) -> int:
    """Most memory this process has used: of the GPU's allocator, or resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(model: Model, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from there to the last."""
    model.engine.forget()
    _settle(model.device)
    marks = [time.perf_counter()]
    marks += [
        time.perf_counter() for _ in model.engine.generate(prompt, SamplingParams(), new_tokens)
    ]
    return marks[1] - marks[0], marks[-1] - marks[1]


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

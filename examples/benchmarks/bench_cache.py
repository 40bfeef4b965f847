"""Time attention over a cache in INT8 beside one in BF16, on this GPU.

Run: python examples/benchmarks/bench_cache.py [decode|prompts] [SIZE ...]
Decode: a token of each of some sequences, microseconds a layer and the share of the read bandwidth
that its keys, values and scales take. Prompts: a chunk of CHUNK tokens after others, beside
PyTorch's flash attention over rows in BF16 that lie side by side. Both caches run in one process,
BF16 before and after INT8 (the better of both counts), over more keys than the L2 cache holds, in
one CUDA graph. Each kernel is first compared with float64. Kernels compile one by one, some seconds
each.
"""

from dataclasses import dataclass
from functools import partial

import click
import torch
from bench_kernels import ROTATED_BYTES, graph_us
from torch import Tensor

from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE, CacheType
from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.engine.graphs import round_kv_len
from lowbit.runtime.kernels.attention.decode import attention_decode
from lowbit.runtime.kernels.attention.prefill import attention_prefill
from lowbit.runtime.kernels.attention.reference import attention_ref
from lowbit.runtime.lab.machine_speed import read_bandwidth
from lowbit.runtime.state.pages import KVPages, new_pages
from lowbit.runtime.state.rope import Rope, rope_tables
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.weights.layers import AttentionLayer

TASKS = ("decode", "prompts")
EPS = 1e-6
KEYS = (1000, 8000, 32000, 128000)
SEQUENCES = (1, 4, 16, 64)
CHUNK = 2048
MOST_COPIES = 24
MOST_SHARE = 0.8  # of the free memory that pages may take
CONTEXT = 131072
CHECKED = 700  # keys
MOST_ERROR = 0.02  # roundings to BF16, of what is compared with float64


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of a model."""

    queries: int
    kv: int
    dim: int
    rotated: int
    gated: bool

    @property
    def width(self) -> int:
        """Elements of a token's queries, gates, keys and values."""
        return (self.queries * (2 if self.gated else 1) + 2 * self.kv) * self.dim


HEADS = {
    "0.6B": Heads(16, 8, 128, 128, False),
    "8B": Heads(32, 8, 128, 128, False),
    "3.5-4B": Heads(16, 4, 256, 64, True),
}


def filled(heads: Heads, copies: int, count: int, cache_type: CacheType) -> KVPages:
    """Pages of random keys and values, one layer a copy."""
    pages = new_pages(copies, count, heads.kv, heads.dim, cache_type, "cuda")
    for layer in range(copies):
        for store in pages.layer(layer):
            if cache_type.scaled:
                store.random_(-127, 128)
            else:
                store.normal_()
    for store in pages.stores[2:]:
        store.fill_(1 / 64)
    return pages


def gains(heads: Heads) -> Tensor:
    """Gains of the norms of queries and keys."""
    dtype = torch.float32 if heads.gated else torch.bfloat16
    return torch.ones(2, heads.dim, dtype=dtype, device="cuda")


def next_tokens(length: int, sequences: int, tables: Tensor) -> Step:
    """The next token of so many sequences of one length; tables hold the context."""
    rows = torch.arange(sequences, dtype=torch.int32, device="cuda")
    return Step(
        positions=torch.full_like(rows, length),
        rows=rows,
        starts=torch.arange(sequences + 1, dtype=torch.int32, device="cuda"),
        tables=tables,
        read=rows,
        write=rows,
        max_kv_len=round_kv_len(length + 1, tables.shape[1] * PAGE),
        longest=1,
        spans=tuple(Span(row, length, 1) for row in range(sequences)),
    )


def chunk_of(first: int, count: int, tables: Tensor) -> Step:
    """A chunk of one sequence's prompt."""
    at = torch.tensor([0, count], dtype=torch.int32, device="cuda")
    return Step(
        positions=first + torch.arange(count, dtype=torch.int32, device="cuda"),
        rows=torch.zeros(count, dtype=torch.int32, device="cuda"),
        starts=at,
        tables=tables,
        read=at[:1],
        write=at[:1].expand(count).contiguous(),
        max_kv_len=CONTEXT,
        longest=count,
        spans=(Span(0, first, count),),
        prompt=True,
    )


def shuffled(sequences: int, needed: int) -> Tensor:
    """Block tables whose pages do not follow one another."""
    ids = 1 + torch.randperm(sequences * needed, device="cuda", dtype=torch.int32)
    tables = torch.zeros(sequences, CONTEXT // PAGE, dtype=torch.int32, device="cuda")
    tables[:, :needed] = ids.view(sequences, needed)
    return tables


def check(heads: Heads, rope: Rope, cache_type: CacheType) -> None:
    """Refuse to time attention that is wrong."""
    tables = shuffled(2, pages_for(CHECKED + 16))
    pages = filled(heads, 1, 2 * pages_for(CHECKED + 16) + 1, cache_type)
    q_norm, k_norm = gains(heads)
    steps = (
        ("decode", attention_decode, next_tokens(CHECKED, 2, tables)),
        ("prompt", attention_prefill, chunk_of(CHECKED, 8, tables)),
    )
    for name, attend, step in steps:
        qkv = torch.randn(len(step.positions), heads.width, device="cuda").bfloat16()
        layer = AttentionLayer(0, rope, EPS, q_norm, k_norm, heads.gated)
        given = qkv, layer, pages, step
        ref, _, _ = attention_ref(*given)
        error = float((attend(*given).double() - ref).norm() / ref.norm())
        if not error < MOST_ERROR:
            raise SystemExit(f"{cache_type.name}, {name}: relative error {error:.1e}")


def decode_us(heads: Heads, rope: Rope, length: int, sequences: int, kind: CacheType) -> float:
    """Microseconds that a layer takes; infinite where its pages do not fit."""
    needed = pages_for(length + 1)
    layer = 2 * sequences * needed * PAGE * heads.kv * kind.vector_bytes(heads.dim)
    copies = min(MOST_COPIES, int(ROTATED_BYTES / layer) + 1)
    torch.cuda.empty_cache()
    if copies * layer > MOST_SHARE * torch.cuda.mem_get_info()[0]:
        return float("inf")
    pages = filled(heads, copies, sequences * needed + 1, kind)
    step = next_tokens(length, sequences, shuffled(sequences, needed))
    qkv = torch.randn(sequences, heads.width, device="cuda").bfloat16()
    q_norm, k_norm = gains(heads)
    own = [AttentionLayer(n, rope, EPS, q_norm, k_norm, heads.gated) for n in range(copies)]

    def layers() -> None:
        for layer in own:
            attention_decode(qkv, layer, pages, step)

    return graph_us(layers, 10) / copies


def time_decode(name: str, heads: Heads, rope: Rope, bandwidth: float) -> None:
    for length in KEYS:
        for sequences in SEQUENCES:
            time = partial(decode_us, heads, rope, length, sequences)
            before, coded, after = time(BF16_CACHE), time(INT8_CACHE), time(BF16_CACHE)
            plain = min(before, after)
            shares = [
                2e6 * length * sequences * heads.kv * kind.vector_bytes(heads.dim) / us / bandwidth
                for kind, us in ((BF16_CACHE, plain), (INT8_CACHE, coded))
            ]
            print(
                f"{name:7}{length:7} keys{sequences:3} tokens  BF16{plain:9.1f} us{shares[0]:6.1%}"
                f"  INT8{coded:9.1f} us{shares[1]:6.1%}  {plain / coded:5.2f} times",
                flush=True,
            )


def flash_us(heads: Heads, past: int) -> float:
    """PyTorch's flash attention of a chunk, without norms, rotation and append."""
    from torch.nn.attention.bias import causal_lower_right

    def rows(count: int, of: int) -> Tensor:
        return torch.randn(1, of, count, heads.dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = rows(CHUNK, heads.queries), rows(past + CHUNK, heads.kv), rows(past + CHUNK, heads.kv)
    mask = causal_lower_right(CHUNK, past + CHUNK) if past else None
    torch.backends.cuda.enable_cudnn_sdp(False)  # makes a plan for each length

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=past == 0, enable_gqa=True
        )

    return graph_us(attend, 5)


def prompt_us(heads: Heads, rope: Rope, past: int, kind: CacheType) -> float:
    """Microseconds of a chunk in one layer."""
    torch.cuda.empty_cache()
    needed = pages_for(past + CHUNK)
    pages, step = filled(heads, 1, needed + 1, kind), chunk_of(past, CHUNK, shuffled(1, needed))
    qkv = torch.randn(CHUNK, heads.width, device="cuda").bfloat16()
    given = qkv, *gains(heads), EPS, rope, pages, step, 0, heads.gated
    return graph_us(partial(attention_prefill, *given), 5)


def time_prompts(name: str, heads: Heads, rope: Rope) -> None:
    for total in (CHUNK, *(length for length in KEYS if length > CHUNK)):
        past = total - CHUNK
        time = partial(prompt_us, heads, rope, past)
        before, coded, after = time(BF16_CACHE), time(INT8_CACHE), time(BF16_CACHE)
        print(
            f"{name:7}{CHUNK} tokens after{past:7}  BF16{min(before, after):9.1f} us"
            f"  INT8{coded:9.1f} us  flash{flash_us(heads, past):9.1f} us",
            flush=True,
        )


@click.command()
@click.argument("words", nargs=-1, metavar="[decode|prompts] [SIZE]...")
def main(words: tuple[str, ...]) -> None:
    """Time decoding or prompts, or both, in the heads of SIZEs: 0.6B, 8B, 3.5-4B."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_cache needs an NVIDIA GPU")
    tasks = [word for word in words if word in TASKS] or TASKS
    sizes = [word for word in words if word not in TASKS] or list(HEADS)
    if unknown := set(sizes) - HEADS.keys():
        raise click.UsageError(f"no size {min(unknown)}")
    bandwidth = read_bandwidth("cuda")
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for name in sizes:
        heads = HEADS[name]
        rope = rope_tables(CONTEXT, heads.rotated, 1e6, "cuda")
        for kind in (BF16_CACHE, INT8_CACHE):
            check(heads, rope, kind)
        if "decode" in tasks:
            time_decode(name, heads, rope, bandwidth)
        if "prompts" in tasks:
            time_prompts(name, heads, rope)


if __name__ == "__main__":
    main()

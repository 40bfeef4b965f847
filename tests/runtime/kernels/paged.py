"""Random pages for attention, and steps over them."""

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.state.pages import KVPages, new_pages
from lowbit.runtime.state.rope import Rope, rope_by_axes
from lowbit.runtime.state.step import Span, Step


def with_axes(step: Step, rope: Rope) -> Step:
    """A step whose tokens have three random positions each, as in a chunk with an image."""
    positions, (M,) = len(rope.cos), step.positions.shape
    axes = torch.randint(positions, (3, M), device=rope.cos.device)
    rows = torch.arange(M, dtype=torch.int32, device=rope.cos.device)
    return replace(step, own_rope=(rope_by_axes(rope, axes, (3, 3, 2)), rows))


def random_pages(
    layers: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    context: int,
    device: str,
    room: int = PAGE,
) -> tuple[KVPages, Tensor]:
    """Pages of sequences that hold so many random tokens and have room for more, and their tables.

    Pages are shuffled and those of a sequence do not follow each other; whatever holds no token is
    NaN: rows from a sequence's length on, the scratch page and every second page of all. Tables end
    with the scratch page, where the context needs no page yet.
    """
    needed = [pages_for(min(length + room, context)) for length in lengths]
    ids = 1 + 2 * torch.randperm(sum(needed))
    pages = new_pages(layers, 2 * sum(needed) + 1, kv_heads, head_dim, BF16_CACHE, device)
    for each in (pages.k, pages.v):
        each.fill_(float("nan"))
    tables = torch.zeros((len(lengths), pages_for(context)), dtype=torch.int32)
    for row, (length, own) in enumerate(zip(lengths, torch.split(ids, needed), strict=True)):
        tables[row, : len(own)] = own.int()
        for each in (pages.k, pages.v):
            shape = (layers, len(own) * PAGE, kv_heads, head_dim)
            values = torch.randn(shape, device=device, dtype=torch.bfloat16)
            values[:, length:] = float("nan")
            each[:, own.to(device)] = values.view(layers, len(own), PAGE, kv_heads, head_dim)
    return pages, tables.to(device)


def rows_of(paged: Tensor, tables: Tensor, row: int, first: int, count: int) -> Tensor:
    """Keys or values of some positions of a sequence, of all layers: [L, count, Hkv, D]."""
    positions = torch.arange(first, first + count, device=paged.device)
    pages = tables[row].long()[positions // PAGE]
    return paged[:, pages, positions % PAGE]


def clone(pages: KVPages) -> KVPages:
    """Pages with a memory of their own."""
    return KVPages(*(each.clone() for each in pages.stores))


def step_of(
    tables: Tensor, spans: list[Span], reach: int = 0, prompt: bool = False, padding: int = 0
) -> Step:
    """The step of some tokens; a reach of 0 is all that the tables hold.

    Angles are other numbers than positions, as behind an image.

    padding: tokens behind those of a prompt, of a row and a position that nobody may look at.
    """
    counts = [span.count for span in spans]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=tables.device)

    return Step(
        positions=numbers(
            [span.first + i for span in spans for i in range(span.count)] + [1 << 30] * padding
        ),
        rows=numbers([span.row for span in spans for _ in range(span.count)] + [1 << 30] * padding),
        starts=numbers([sum(counts[:i]) for i in range(len(counts) + 1)]),
        tables=tables,
        read=numbers([0] * len(spans)),
        write=numbers([0] * (sum(counts) + padding)),
        max_kv_len=reach or tables.shape[1] * PAGE,
        longest=max(counts),
        spans=tuple(spans),
        prompt=prompt,
        own_angles=numbers(
            [span.first + 1 + span.row % 4 + i for span in spans for i in range(span.count)]
            + [1 << 30] * padding
        ),
    )

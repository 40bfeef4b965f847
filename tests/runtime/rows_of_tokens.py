"""Requests for tests of the choice of tokens: random parameters, and steps over several rows."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lowbit.runtime.state.host_rings import RING, new_ring
from lowbit.runtime.state.sampler import SamplerRows, new_sampler_rows
from lowbit.runtime.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: parameters, prompt, position of its last token, tokens that a mask allows."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    position: int = 5
    allowed: tuple[int, ...] | None = None


def some_params(V: int) -> st.SearchStrategy[SamplingParams]:
    """Any combination of parameters."""
    penalty = st.sampled_from([0.0, 0.0, -2.0, 0.3, 1.5])
    bias = st.dictionaries(
        st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 0.7, 5.0, 100.0]), max_size=4
    )
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5, 20, 32, 33, 64, 65, 2000]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=penalty,
        frequency_penalty=penalty,
        seed=st.integers(0, 2**63 - 1),
        logit_bias=bias.map(lambda pairs: tuple(pairs.items())),
    )


def some_requests(V: int) -> st.SearchStrategy[list[Asked]]:
    """One to six requests."""
    ids = st.integers(0, V - 1)
    one = st.builds(
        Asked,
        params=some_params(V),
        prompt=st.lists(ids, max_size=5).map(tuple),
        position=st.integers(0, 2**20),
        allowed=st.none() | st.lists(ids, max_size=40).map(tuple),
    )
    return st.lists(one, min_size=1, max_size=6)


def words_of(ids: tuple[int, ...], V: int) -> Tensor:
    """The bit mask that allows these tokens."""
    words = [0] * (-(-V // 32))
    for id in ids:
        words[id // 32] |= 1 << id % 32
    return torch.tensor([w - 2**32 if w >> 31 else w for w in words], dtype=torch.int32)


def configured(
    asked: list[Asked], V: int, device: str, rows: list[int] | None = None, count: int = 0
) -> SamplerRows:
    """A sampler with these requests, in rows 1, 2, 3... unless they are named."""
    sampler = new_sampler_rows(count or len(asked) + 1, V, device)
    for row, one in zip(rows or range(1, len(asked) + 1), asked, strict=True):
        masked = one.allowed is not None
        sampler.configure_row(row, one.params, one.prompt, masked=masked)
        if one.allowed is not None:
            sampler.allow(row, words_of(one.allowed, V))
    return sampler


def run(
    ops: Any,
    logits: list[Tensor],
    asked: list[Asked],
    V: int,
    shape_of: SamplerRows | None = None,
) -> list[list[int]]:
    """Tokens as the host reads them, a list for each request, of a step for each logits [M, V].

    shape_of: take the operations of this sampler's shape, which must be at least as rich.
    """
    device = logits[0].device
    sampler = configured(asked, V, device.type)
    if shape_of is not None:
        sampler.shape = replace(shape_of.shape)
    rows = torch.arange(1, len(asked) + 1, dtype=torch.int32, device=device)
    positions = torch.tensor([a.position for a in asked], dtype=torch.int32, device=device)
    token = torch.zeros(len(asked), dtype=torch.int64, device=device)
    slots = new_ring(sampler.rows, device.type == "cuda")
    read: list[list[int]] = [[] for _ in asked]
    for step, each in enumerate(logits, start=1):
        ops.choose(each, sampler, rows, positions, token, slots)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for m, one in enumerate(asked):
            read[m].append(int(slots[(one.position + step) % RING, m + 1]))
            assert read[m][-1] in (-1, int(token[m]))
            assert 0 <= int(token[m]) < V
            assert int(positions[m]) == one.position + step
    return read

"""Kernels that choose tokens for several rows, against the same choice in PyTorch on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.runtime.backends import cpu, cuda
from lowbit.runtime.state.host_rings import RING, new_ring
from lowbit.runtime.state.sampler import SCRATCH, ChoiceShape, SamplerRows
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.kernels.sampling.logits import PADDED, STRICT, VOCABULARY, some_logits
from tests.runtime.rows_of_tokens import Asked, configured, run, some_requests, words_of

PARAMS = (
    SamplingParams(),
    SamplingParams(0.7, 20, 0.8, seed=1),
    SamplingParams(1.5, 1, seed=2),
    SamplingParams(1.0, 5, min_p=0.2, seed=3),
    SamplingParams(0.1, 64, 0.99, 0.01, seed=2**63 - 1),
    SamplingParams(1.0, 100, seed=5),
    SamplingParams(1.0, 0, 0.9, seed=6),
    SamplingParams(1.0, 2000, seed=7),
)
NAMES = ["greedy", "top 20", "top 1", "top 5", "top 64", "top 100", "top p", "top 2000"]
on_gpu = pytest.mark.gpu
# Gluon is not interpreted: `draw_rows` needs a GPU.
DRAWN = {"top 20", "top 5", "top 64"}
EVERY = [
    pytest.param(params, marks=on_gpu) if name in DRAWN else params
    for name, params in zip(NAMES, PARAMS, strict=True)
]


def check(device: str, asked: list[Asked], logits: list[Tensor], V: int = VOCABULARY) -> None:
    """The kernels choose the tokens that the CPU chooses."""
    ours = run(cuda, [each.to(device) for each in logits], asked, V)
    assert ours == run(cpu, logits, asked, V)


@pytest.mark.parametrize("params", [EVERY[0], EVERY[5], EVERY[1]], ids=["greedy", "drawn", "few"])
def test_masks_of_each_token(device: str, params: SamplingParams) -> None:
    """A row that is not masked takes any token, and one that is penalized ignores its own mask."""
    asked = [
        Asked(params, allowed=(7,)),
        Asked(replace(params, presence_penalty=0.5), allowed=(8,)),
        Asked(params),
    ]
    rows = torch.tensor([1, 1, 2, 1, 3, SCRATCH], dtype=torch.int32)
    positions = torch.tensor([4, 5, 9, 6, 7, 0], dtype=torch.int32)
    logits = some_logits(9, len(rows))[0]
    allowed = [(3, 2999), tuple(range(0, 3000, 5)), (1, 2, 3), (VOCABULARY - 1,), (0,), (0,)]
    found = []
    for where, ops in (("cpu", cpu), (device, cuda)):
        sampler = configured(asked, VOCABULARY, where)
        for place, ids in enumerate(allowed):
            sampler.mask[sampler.rows + place] = words_of(ids, VOCABULARY)
        token = torch.zeros(6, dtype=torch.int64, device=where)
        slots = new_ring(4, pinned=where == "cuda")
        masks = torch.arange(sampler.rows, sampler.rows + len(rows), dtype=torch.int32)
        given = [each.to(where, copy=True) for each in (rows, positions, masks)]
        ops.choose(logits.to(where), sampler, given[0], given[1], token, slots, given[2])
        if where == "cuda":
            torch.cuda.synchronize()
        found.append((token.tolist(), slots[:, 1:].tolist()))
        free = configured([Asked(params)], VOCABULARY, where)
        alone = torch.zeros(1, dtype=torch.int64, device=where)
        at = positions[4:5].to(where, copy=True)
        ops.choose(logits[4:5].to(where), free, given[0][:1], at, alone, slots)
        assert int(alone) == found[-1][0][4]
    tokens = found[0][0]
    assert found[0] == found[1]
    assert all(tokens[place] in allowed[place] for place in range(4))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("params", EVERY, ids=NAMES)
def test_choose_matches_cpu(device: str, params: SamplingParams, strict: bool) -> None:
    if strict:
        params = replace(
            STRICT, **{n: getattr(params, n) for n in ("temperature", "top_k", "top_p", "seed")}
        )
    asked = [Asked(params, (5, 6), position=p) for p in (1, 2, 70_000)]
    check(device, asked, some_logits(1, 3, steps=2))


@pytest.mark.parametrize("params", EVERY, ids=NAMES)
def test_columns_that_stand_for_other_tokens(device: str, params: SamplingParams) -> None:
    """A column's token is looked up; which column is chosen does not depend on it."""
    logits, tokens = some_logits(6, 3)[0], (7 * torch.arange(VOCABULARY)) % 5003
    found = {}
    for name, (where, ops, ids) in {
        "columns": ("cpu", cpu, None),
        "cpu": ("cpu", cpu, tokens),
        "ours": (device, cuda, tokens.to(device)),
    }.items():
        sampler = configured([Asked(params)] * 3, VOCABULARY, where)
        rows = torch.arange(1, 4, dtype=torch.int32, device=where)
        positions, token = rows + 4, torch.zeros(3, dtype=torch.int64, device=where)
        slots = new_ring(4, pinned=where == "cuda")
        ops.choose(logits.to(where), sampler, rows, positions, token, slots, ids=ids)
        if where == "cuda":
            torch.cuda.synchronize()
        found[name] = token.tolist()
        assert [int(slots[(row + 5) % RING, row]) for row in (1, 2, 3)] == found[name]
    assert found["ours"] == found["cpu"] == tokens[found["columns"]].tolist()


def test_signs_of_zero_and_small_numbers(device: str) -> None:
    logits = torch.full((4, PADDED), -1.0)
    logits[0, [5, 9]] = torch.tensor([-0.0, 0.0])
    logits[1, [5, 9]] = torch.tensor([0.0, -0.0])
    logits[2, [5, 9]] = torch.tensor([0.0, 1e-45])
    logits[3, [5, 9]] = torch.tensor([-1e-45, -0.0])
    asked = [Asked(SamplingParams())] * 4
    assert run(cuda, [logits.to(device)], asked, VOCABULARY) == [[5], [5], [9], [9]]
    assert run(cpu, [logits], asked, VOCABULARY) == [[5], [5], [9], [9]]


@on_gpu
@given(seed=st.integers(0, 1000), asked=some_requests(VOCABULARY))
def test_choose_in_company_matches_cpu(device: str, seed: int, asked: list[Asked]) -> None:
    logits = some_logits(seed, len(asked), steps=2)
    together = run(cuda, [each.to(device) for each in logits], asked, VOCABULARY)
    assert together == run(cpu, logits, asked, VOCABULARY)
    for m, one in enumerate(asked):
        alone = [each[m : m + 1].to(device) for each in logits]
        assert run(cuda, alone, [one], VOCABULARY) == [together[m]]


@on_gpu
@pytest.mark.parametrize("vocabulary", [1, 2, 40, 300, 1024, 1025, 1500, 151669, 248077])
def test_vocabulary_sizes(device: str, vocabulary: int) -> None:
    """Fewer tokens or groups than top_k, half of the tokens impossible, likely ones in a row."""
    asked = [Asked(replace(params, seed=m)) for m, params in enumerate(PARAMS)]
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(8, vocabulary, generator=generator) * 3 for _ in range(3)]
    logits[0][:, torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]] = -torch.inf
    logits[1][:, vocabulary // 2 : vocabulary // 2 + 10] += 20
    check(device, asked, logits, vocabulary)
    check(device, asked[:5], [each[:5] for each in logits], vocabulary)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # interpreted
@pytest.mark.parametrize(
    ("value", "params"),
    [
        *((float("nan"), params) for params in PARAMS[:1] + PARAMS[5:]),
        *((-float("nan"), params) for params in (PARAMS[2], PARAMS[6])),
        *((float("inf"), params) for params in (PARAMS[0], PARAMS[5])),
        *((float("-inf"), params) for params in (PARAMS[0], PARAMS[7])),
        *(pytest.param(float(v), p, marks=on_gpu) for v in ("nan", "-inf") for p in PARAMS[1:5]),
    ],
)
def test_nonfinite_logits_mark_their_row(device: str, params: SamplingParams, value: float) -> None:
    """One in the second row, and nothing else in the fourth; one -inf is harmless."""
    logits = some_logits(2, 5)
    logits[0][1, 3000] = value
    logits[0][3, :VOCABULARY] = value
    asked = [Asked(replace(params, seed=m)) for m in range(5)]
    got = run(cuda, [logits[0].to(device)], asked, VOCABULARY)
    one = value != -torch.inf
    assert [tokens == [-1] for tokens in got] == [False, one, False, True, False]


@pytest.mark.parametrize(
    "params", [PARAMS[0], pytest.param(PARAMS[1], marks=on_gpu)], ids=NAMES[:2]
)
def test_masks(device: str, params: SamplingParams) -> None:
    asked = [Asked(params, allowed=ids) for ids in ((), (VOCABULARY - 1,), (31, 32), None)]
    check(device, asked, some_logits(3, 4, steps=2))
    got = run(cuda, [some_logits(3, 4)[0].to(device)], asked, VOCABULARY)
    assert got[:2] == [[-1], [VOCABULARY - 1]]


@contextmanager
def captured(graph: "torch.cuda.CUDAGraph") -> Iterator[None]:
    """Record what is launched; kernels have run before, so nothing is compiled."""
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        yield


@on_gpu
@pytest.mark.parametrize("most", PARAMS, ids=NAMES)
@pytest.mark.parametrize("adjusting", [False, True])
def test_choose_in_a_graph(device: str, most: SamplingParams, adjusting: bool) -> None:
    """Captured over the scratch row alone, replayed for other rows in every step."""
    strict = replace(most, logit_bias=((9, 1.0),), frequency_penalty=0.5) if adjusting else most
    easy = replace(most, temperature=min(0.6, most.temperature), seed=8)
    asked = [Asked(strict), Asked(easy), Asked(SamplingParams()), Asked(replace(easy, seed=9))]
    if adjusting:
        asked[2] = Asked(SamplingParams(), allowed=tuple(range(50, 90)))
    gpu, host = (configured(asked, VOCABULARY, each, count=6) for each in (device, "cpu"))
    M = 4
    rows = torch.full((M,), SCRATCH, dtype=torch.int32, device=device)
    positions = torch.zeros(M, dtype=torch.int32, device=device)
    token = torch.zeros(M, dtype=torch.int64, device=device)
    slots = new_ring(6, pinned=True)
    logits = torch.zeros(M, PADDED, device=device)
    graph = torch.cuda.CUDAGraph()
    cuda.choose(logits, gpu, rows, positions, token, slots)
    with captured(graph):
        cuda.choose(logits, gpu, rows, positions, token, slots)
    lengths = {row: 10 * row for row in range(1, 6)}
    for step, at in enumerate(
        [[1, 2, 3, 4], [4, 1, 0, 0], [0, 3, 0, 2], [2, 1, 4, 3], [5, 1, 2, 3]]
    ):
        if 5 in at:
            for sampler in (gpu, host):
                sampler.configure_row(5, replace(easy, seed=77), [1])
        fresh = some_logits(step, M)[0][:, :PADDED]
        logits.copy_(fresh)
        rows.copy_(torch.tensor(at))
        positions.copy_(torch.tensor([lengths.get(row, 0) for row in at]))
        graph.replay()
        torch.cuda.synchronize()
        check_step(host, fresh, at, lengths, slots)
        lengths |= {row: lengths[row] + 1 for row in at if row}
        assert positions.tolist() == [lengths.get(row, 0) for row in at]
    assert torch.equal(gpu.counts[1:].cpu(), host.counts[1:])


def check_step(
    sampler: SamplerRows, logits: Tensor, at: list[int], lengths: dict[int, int], slots: Tensor
) -> None:
    """The slots hold the tokens that the CPU chooses for these rows."""
    rows = torch.tensor(at, dtype=torch.int32)
    positions = torch.tensor([lengths.get(row, 0) for row in at], dtype=torch.int32)
    token, expected = torch.zeros(len(at), dtype=torch.int64), torch.zeros_like(slots)
    cpu.choose(logits, sampler, rows, positions, token, expected)
    for row in filter(None, at):
        place = (lengths[row] + 1) % RING, row
        assert int(slots[place]) == int(expected[place])


def test_masks_change_between_steps(device: str) -> None:
    sampler = configured([Asked(SamplingParams(), allowed=(1,))], VOCABULARY, device)
    assert sampler.shape == ChoiceShape(1, adjusted=True)
    logits = some_logits(6, 1)[0].to(device)
    rows, positions = torch.ones(2, 1, dtype=torch.int32, device=device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    slots = new_ring(2, pinned=device == "cuda")
    for id in (1, 32, VOCABULARY - 1, 0):
        sampler.allow(1, words_of((id,), VOCABULARY))
        cuda.choose(logits, sampler, rows, positions, token, slots)
        assert int(token) == id

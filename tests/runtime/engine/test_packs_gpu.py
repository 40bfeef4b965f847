"""Chunks of several prompts that pass the layers together: the bytes of each prompt alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.thresholds import EXACT_TOKENS, PACK_SEQUENCES

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="prompts pass together on Hopper alone"),
]

MODELS = Path(__file__).parents[3] / "examples" / "models"
IDS = torch.randint(4000, (20, 400), generator=torch.Generator().manual_seed(9)).tolist()
# Tokens of prompts: those that small programs attend to and those that large ones do, short ones,
# and more prompts than a chunk has room for
SETS = (
    (100, 60, 128, 129, 250, 20, 17, 200),
    (129, 300, 65, 300, 200),
    (70,) * 10,
    (20, 30, 40, 17, 64),
    (3, 16, 9, 1, 12, 16, 7),
    (18,) * (PACK_SEQUENCES + 3),
)
NEW = 8
Load = Callable[..., lowbit.Model]


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def load(request: pytest.FixtureRequest) -> Load:
    def made(**options: Any) -> lowbit.Model:
        sizes: dict[str, Any] = {"quantize": "int4", "context": 512, "max_sequences": 24}
        return lowbit.load(MODELS / request.param, device="cuda", **(sizes | options))

    return made


@pytest.fixture(params=["int8", "exact"])
def activations(request: pytest.FixtureRequest) -> Any:
    return request.param


def left_by(model: lowbit.Model, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of requests at once, and the bytes that their prompts leave."""
    engine = model.engine
    engine.forget()
    params = lowbit.SamplingParams(logprobs=3)
    handles = [engine.submit(Request(tuple(ids), params, NEW)) for ids in prompts]
    bits: dict[Handle, list[Tensor]] = {}
    while len(bits) < len(handles):
        engine.step()
        for handle, ids in zip(handles, prompts, strict=True):
            if handle._sequence.length >= len(ids) and handle not in bits:
                bits[handle] = stored(model, handle, len(ids))
    return [(each.result(), list(each.log_probabilities), bits[each]) for each in handles]


def stored(model: lowbit.Model, handle: Handle, count: int) -> list[Tensor]:
    pages = torch.tensor(handle._sequence.pages, device="cuda")
    stores = model.engine.runner.state.pages.stores
    rows = [store[:, pages].flatten(1, 2)[:, :count] for store in stores]
    return [each.contiguous().view(torch.uint8) for each in rows]


def same(one: tuple[Any, ...], other: tuple[Any, ...], bytes_too: bool) -> bool:
    return one[:2] == other[:2] and (not bytes_too or all(map(torch.equal, one[2], other[2])))


@pytest.mark.parametrize("kv_cache", ["bf16", "int8"])
@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_prompts_that_pass_together_leave_the_bytes_of_each_alone(
    load: Load,
    packs: list[tuple[int, ...]],
    activations: Any,
    kv_cache: Any,
    speculate: Any,
) -> None:
    model = load(activations=activations, kv_cache=kv_cache, speculate=speculate)
    if speculate == "off":
        model.engine.drafting = None
    for counts in SETS:
        prompts = [ids[:count] for ids, count in zip(IDS, counts, strict=False)]
        alone = [left_by(model, [ids])[0] for ids in prompts]
        for turn in range(3):  # launched, recorded, replayed
            packs.clear()
            for ids, one, other in zip(prompts, left_by(model, prompts), alone, strict=True):
                # A head that drafts reads as much of a prompt as pays by then.
                assert same(one, other, speculate == "off"), (counts, len(ids), turn)
            many = [each for each in packs if len(each) > 1]
            whole = activations == "int8" or max(counts) <= EXACT_TOKENS
            assert many or not whole, counts
            if activations == "exact":
                assert all(sum(each) <= EXACT_TOKENS for each in many)


def test_prompts_go_on_together_behind_what_the_cache_has(
    load: Load, packs: list[tuple[int, ...]]
) -> None:
    """Chunks that begin at positions of their own, behind a prefix and behind a first chunk."""
    model = load(activations="int8", speculate="off", context=512)
    model.engine.drafting = None
    end = 4001
    ends = frozenset({end})

    def answers(prompts: list[list[int]], together: bool) -> list[Any]:
        model.engine.forget()
        first = Request((*IDS[0][:130], end, 5), lowbit.SamplingParams(), 1, message_ends=ends)
        model.engine.submit(first).result()
        params, found = lowbit.SamplingParams(logprobs=2), []
        for part in [prompts] if together else [[ids] for ids in prompts]:
            requests = [Request(tuple(ids), params, NEW, message_ends=ends) for ids in part]
            handles = [model.engine.submit(each) for each in requests]
            found += [(each.result(), list(each.log_probabilities)) for each in handles]
        return found

    begin = [*IDS[0][:130], end]
    prompts = [[*begin, *IDS[n][:count]] for n, count in enumerate((30, 140, 9, 70), start=1)]
    prompts += [[*IDS[5][:90], end, *IDS[6][:20]]]
    expected = answers(prompts, together=False)
    for _ in range(3):
        packs.clear()
        assert answers(prompts, together=True) == expected
        assert (30, 140, 70, 91) in packs

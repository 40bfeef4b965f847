"""The engine on a GPU: the captured graph against the same step run directly."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.scheme import Scheme
from lowbit.runtime.sampling import new_sampler, sample

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

pytestmark = pytest.mark.gpu

GREEDY = lowbit.SamplingParams()
SAMPLED = (
    lowbit.SamplingParams(temperature=1.5, seed=1),
    lowbit.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    lowbit.SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3),
)
PROMPT = torch.randint(256, (37,), generator=torch.Generator().manual_seed(2)).tolist()
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def mixed(role: str) -> Scheme:
    return Scheme(4, 128) if role == "mlp" else Scheme(8, 128)


@pytest.fixture
def model(make_model: "Callable[..., PackedModel]") -> lowbit.Model:
    return lowbit.load(make_model(mixed, **SHAPE).folder, device="cuda")


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED])
def test_the_graph_gives_the_tokens_of_the_step(
    model: lowbit.Model, params: lowbit.SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = list(model.engine.generate(PROMPT, params, 60))
    again = list(model.engine.generate(PROMPT, params, 60))
    monkeypatch.setattr(type(model.engine), "_capture", lambda engine: None)
    model.engine._graph = None
    model.engine.forget()
    assert captured == list(model.engine.generate(PROMPT, params, 60))
    assert len(captured) == 60
    # the second run reuses all of the prompt but its last token, which then takes the decode path
    assert len(again) == 60


def test_changing_parameters_captures_a_graph_that_fits(model: lowbit.Model) -> None:
    expected = []
    for params in (GREEDY, *SAMPLED):
        model.engine.forget()
        expected.append(list(model.engine.generate(PROMPT, params, 30)))
    assert len({tuple(tokens) for tokens in expected}) == 4
    for params, tokens in zip(
        (*SAMPLED[::-1], GREEDY), (*expected[:0:-1], expected[0]), strict=True
    ):
        model.engine.forget()
        assert list(model.engine.generate(PROMPT, params, 30)) == tokens


def test_a_full_context_and_an_early_stop_leave_it_usable(model: lowbit.Model) -> None:
    full = list(model.engine.generate(PROMPT, GREEDY, 10_000))
    assert len(full) == 256 - len(PROMPT) + 1
    model.engine.forget()
    request = model.engine.generate(PROMPT, GREEDY, 50)
    begun = [next(request) for _ in range(5)]
    del request
    assert begun == full[:5]
    model.engine.forget()
    assert list(model.engine.generate(PROMPT, GREEDY, 50)) == full[:50]


def test_bf16_is_close_to_the_exact_weights(
    make_model: "Callable[..., PackedModel]", reference: "Callable[[PackedModel], Any]"
) -> None:
    packed = make_model(mixed, **SHAPE)
    hub = reference(packed)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        exact = hub(ids).logits[0].double()
        rounded = hub.to("cuda", torch.bfloat16)(ids.cuda()).logits[0].double().cpu()
    got = lowbit.load(packed.folder, device="cuda").logits(PROMPT).double().cpu()
    assert (got - exact).norm() < 1.25 * (rounded - exact).norm()


def test_sampling_gives_the_same_on_both_devices() -> None:
    logits = torch.randn(64, 1, 1000, generator=torch.Generator().manual_seed(0)) * 3
    for params in SAMPLED:
        tokens = []
        for device in ("cpu", "cuda"):
            sampler = new_sampler(1000, 64, device)
            sampler.start(params, [1, 2], 64)
            tokens.append([int(sample(row.to(device), sampler)) for row in logits])
        assert tokens[0] == tokens[1]


def test_weights_of_both_devices_are_the_same(make_model: "Callable[..., PackedModel]") -> None:
    folder = make_model(mixed, **SHAPE).folder
    on_gpu = lowbit.load(folder, device="cuda").engine.decoder
    exact = lowbit.load(folder, device="cpu", dtype=torch.float32).engine.decoder
    for ours, theirs in zip(on_gpu.layers, exact.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            a, b = getattr(ours, name).dequantized().cpu(), getattr(theirs, name).weight
            assert torch.equal(a, b)
    assert torch.equal(on_gpu.embedding.float().cpu(), exact.embedding)

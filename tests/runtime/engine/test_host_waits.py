"""The host sends prompts, new batches and rounds with drafts without waiting for the device.

Meta tensors stand in for those of a GPU: they have no content, so whatever would read one back
raises, and a mode of PyTorch finds copies from the host that would be waited for. The model and its
kernels are left out; `test_engine_gpu` asks CUDA itself.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowbit.formats.architectures.config import LinearLayers
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.host_rings import to_device, write
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.engine.draft.guesses import drafting_by, guessers
from tests.runtime.engine.graph_stand_in import Event, Stream

META = torch.device("meta")
H, VOCABULARY, CONTEXT = 8, 300, 3000
SIZE = CacheSize(context=CONTEXT, sequences=3, pages=120, snapshots=4, drafts=9)
PARAMS = (
    SamplingParams(),
    SamplingParams(0.8, top_k=20, seed=2, logprobs=2),
    SamplingParams(1.0, repetition_penalty=1.3, logit_bias=((3, 1.0),), seed=3),
)


class HostWaits(TorchFunctionMode):
    """Refuses operations by which the host waits until a device is done."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            assert torch.device(kwargs.get("device") or "cpu") != META, "numbers copied at once"
        result = func(*args, **kwargs)
        tensors = [each for each in args if isinstance(each, Tensor)]
        from_host = any(each.device.type == "cpu" and each.dim() > 0 for each in tensors)
        to_meta = any(each.is_meta for each in (*tensors, result) if isinstance(each, Tensor))
        if from_host and to_meta:
            assert kwargs.get("non_blocking"), f"{func.__name__} waits for a copy"
        return result


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: torch.tensor([1, 2], device=META),
        lambda x: torch.ones(2).to(META),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: x.__setitem__(slice(0, 2), torch.ones(2)),
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
    ],
)
def test_stand_in_finds_waits(waits: Callable[[Tensor], object]) -> None:
    x = torch.zeros(2, device=META)
    with HostWaits(), pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        waits(x)


def test_numbers_are_copied_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []

    def tensor(values: object, dtype: torch.dtype, pin_memory: bool) -> SimpleNamespace:
        def to(device: torch.device, non_blocking: bool) -> None:
            copies.append((values, dtype, pin_memory, device.type, non_blocking))

        return SimpleNamespace(to=to, pinned=pin_memory)

    def copy_(source: SimpleNamespace, non_blocking: bool) -> None:
        copies.append((source.pinned, non_blocking))

    monkeypatch.setattr(torch, "tensor", tensor)
    to_device([1, 2], torch.int32, torch.device("cuda"))
    target: Any = SimpleNamespace(dtype=torch.int64, is_cuda=True, copy_=copy_)
    write(target, [3])
    assert copies == [([1, 2], torch.int32, True, "cuda", True), (True, True)]


def decoder(mtp: bool) -> Any:
    """A model that computes nothing, with recurrent states, and a head if `mtp`."""

    def hidden(ids: Tensor, *rest: object, **options: object) -> Tensor:
        return torch.empty(len(ids), H, device=META)

    def nothing(*args: object) -> None: ...

    output = SimpleNamespace(choose=nothing)
    return SimpleNamespace(
        each_layer=lambda ids, *rest: iter([hidden(ids)]),
        logits=lambda rows: torch.empty(len(rows), VOCABULARY, device=META),
        config=SimpleNamespace(
            vocab_size=VOCABULARY,
            hidden_size=H,
            max_position_embeddings=CONTEXT,
            kv_layers=1,
            rope_sections=None,
            num_key_value_heads=1,
            head_dim=4,
            linear_layers=LinearLayers(1, 1, 1, 2, 2, taps=4),
        ),
        ops=SimpleNamespace(
            choose=nothing,
            log_probabilities=nothing,
            store_hidden=nothing,
            accept=nothing,
            place_drafts=nothing,
            embed=lambda ids, table: torch.empty(len(ids), H, device=META),
        ),
        mtp=SimpleNamespace(hidden=hidden, output=output, lone=False) if mtp else None,
    )


@pytest.fixture
def new_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Engine]:
    """Makes an engine that takes a GPU's way over meta tensors; every token is 0."""

    def directly(graphs: Graphs, key: object, step: Callable[[], None], *tensors: object) -> None:
        step()

    monkeypatch.setattr(Runner, "on_gpu", property(lambda runner: True))
    monkeypatch.setattr(Graphs, "run", directly)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    pinned = torch.zeros
    empty: Callable[..., Tensor] = torch.empty
    monkeypatch.setattr(
        torch, "zeros", lambda *sizes, pin_memory=False, **options: pinned(*sizes, **options)
    )

    def snapshot(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """Memory that a device without content can be copied to."""
        return empty(*sizes, **({"device": META} if pin_memory else {}), **options)

    monkeypatch.setattr(torch, "empty", snapshot)

    def make(drafts: bool) -> Engine:
        runner = new_runner(decoder(mtp=drafts), VOCABULARY, SIZE, torch.bfloat16, "meta")
        drafting = None
        if drafts:
            truths = {prompt(place): [0] * 200 for place in range(len(PARAMS))}
            drafting = drafting_by(guessers(truths, 1), runner, 3)
        return Engine(runner, drafting=drafting)

    return make


def prompt(place: int) -> tuple[int, ...]:
    return tuple(1 + at % 250 for at in range(2500 if place == 1 else 40 + place))


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_the_host_waits_for_tokens_alone(
    new_engine: Callable[[bool], Engine], drafts: bool
) -> None:
    engine, handles = new_engine(drafts), []
    with HostWaits():
        for place, params in enumerate(PARAMS):
            scored = 2 if place == 1 else None
            request = Request(prompt(place), params, 30 + place, prompt_logprobs=scored)
            handles.append(engine.submit(request))
            for _ in range(4):
                engine.step()
        answers = [handle.result() for handle in handles]
        if not drafts:
            again = engine.generate((*prompt(0), *answers[0][:-1], 1), PARAMS[0], 2)
            assert again.result() == (0, 0)
            assert again.reused == len(prompt(0)) + 29
    assert answers == [(0,) * (30 + place) for place in range(len(PARAMS))]


def test_running_sequences_do_not_wait_for_a_prompt(
    new_engine: Callable[[bool], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step hands out the tokens of the step before, also where it sends a prompt's last chunk."""
    waited: list[Any] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    engine = new_engine(False)
    first = engine.generate(prompt(0), PARAMS[0], 50)
    assert next(first) == 0
    second = engine.generate(prompt(1), PARAMS[0], 50)
    while len(engine.scheduler.decoding) == 1:
        sent: Any = engine._sent[-1]
        expected = [sent.done]
        waited.clear()
        engine.step()
        assert waited == expected
    assert not second.begun
    engine.step()
    assert second.begun

"""Several sequences decoded together: each as if it were alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends import cpu, cuda
from lowbit.runtime.engine import engine, memory
from lowbit.runtime.engine.batch import Batch, decode_batch, start_batch
from lowbit.runtime.models.dense import Dense
from lowbit.runtime.state.delta import DeltaState, DeltaWeights, new_delta_state

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
LENGTHS = (5, 40, 1, 23)
CONTEXT = 64
NEW = 20
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(*LENGTHS)


@pytest.fixture(params=["dense", "hybrid"])
def make(
    request: pytest.FixtureRequest,
    make_model: "Callable[..., PackedModel]",
    make_qwen3_5: "Callable[..., PackedModel]",
) -> "Callable[..., PackedModel]":
    return make_model if request.param == "dense" else make_qwen3_5


@pytest.fixture
def packed(make: "Callable[..., PackedModel]") -> "PackedModel":
    return make()


@pytest.fixture
def model(packed: "PackedModel") -> lowbit.Model:
    return exact(packed)


@pytest.fixture
def short_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache's reach is 3, 12 or 48 rows, then all."""
    monkeypatch.setattr("lowbit.runtime.state.cache.FIRST_REACH", 3)


def exact(packed: "PackedModel") -> lowbit.Model:
    return lowbit.load(packed.folder, device="cpu", dtype=torch.float32, context=CONTEXT)


def alone(model: lowbit.Model, prompt: list[int], count: int = NEW) -> list[int]:
    model.engine.forget()
    return list(model.engine.generate(prompt, GREEDY, count))


@pytest.mark.usefixtures("short_reach")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_tokens_are_those_of_each_prompt_alone(model: lowbit.Model, count: int) -> None:
    got = decode_batch(model, PROMPTS[:count], NEW)
    assert got == [alone(model, prompt) for prompt in PROMPTS[:count]]
    assert len({tuple(tokens) for tokens in got}) == count
    assert all(len(set(tokens)) > 5 for tokens in got)


def test_tokens_are_those_of_transformers(
    packed: "PackedModel", reference: "Callable[[PackedModel], Any]"
) -> None:
    hub = reference(packed)
    for prompt, tokens in zip(PROMPTS, decode_batch(exact(packed), PROMPTS, NEW), strict=True):
        with torch.no_grad():
            logits = hub(torch.tensor([[*prompt, *tokens]])).logits[0]
        scores = logits[len(prompt) - 1 : -1, : exact(packed).tokenizer.vocabulary]
        assert tokens == scores.argmax(-1).tolist()


@pytest.mark.usefixtures("short_reach")
def test_steps_go_as_far_as_the_longest_sequence(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = start_batch(model, prompts_of(4, 9), 8)
    assert batch.cache.context == 16
    assert batch.cache.position.tolist() == [4, 9]
    seen = []
    step = Batch._step

    def noted(self: Batch) -> None:
        seen.append((self.cache.length, self.cache.reach))
        step(self)

    monkeypatch.setattr(Batch, "_step", noted)
    assert batch.decode(3).shape == (3, 2)
    batch.decode(4)
    assert seen == [(9, 12), (10, 12), (11, 12), (12, 16), (13, 16), (14, 16), (15, 16)]
    assert batch.cache.position.tolist() == [11, 16]
    with pytest.raises(RequestError, match=r"16 \+ 1 tokens do not fit the cache of 16"):
        batch.decode(1)


def test_steps_may_be_asked_for_bit_by_bit(model: lowbit.Model) -> None:
    whole = start_batch(model, PROMPTS, NEW).decode(NEW - 1)
    batch = start_batch(model, PROMPTS, NEW)
    parts = [batch.decode(n) for n in (1, 0, 7, NEW - 9)]
    assert torch.equal(torch.cat(parts), whole)


def test_neighbours_and_places_do_not_matter(model: lowbit.Model) -> None:
    straight = decode_batch(model, PROMPTS, NEW)
    assert decode_batch(model, PROMPTS[::-1], NEW) == straight[::-1]
    assert decode_batch(model, [PROMPTS[1]] * 8, NEW) == [straight[1]] * 8
    longer = [*PROMPTS[0], 3]  # shares a prefix
    assert decode_batch(model, [PROMPTS[0], longer], NEW) == [straight[0], alone(model, longer)]


def test_padding_of_the_vocabulary_is_never_chosen(
    make_model: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact(make_model())
    real, logits = model.tokenizer.vocabulary, Dense.logits

    def favoured(decoder: Dense[Any], hidden: Tensor) -> Tensor:
        out = logits(decoder, hidden)
        out[:, real:] = 1e9
        return out

    expected = decode_batch(model, PROMPTS, NEW)
    monkeypatch.setattr(Dense, "logits", favoured)
    assert real < model.opened.config.vocab_size
    assert decode_batch(model, PROMPTS, NEW) == expected


def test_the_engine_is_usable_before_and_after(model: lowbit.Model) -> None:
    expected = alone(model, PROMPTS[3])
    got = decode_batch(model, PROMPTS, NEW)
    longer = [*PROMPTS[3], *expected[:4], 9]
    after = list(model.engine.generate(longer, GREEDY, NEW))
    assert after == alone(model, longer)
    assert got[3] == expected


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "message"),
    [
        ([], 4, "0 sequences cannot be decoded together"),
        ([[1]] * 9, 4, "9 sequences cannot be decoded together"),
        ([[1], []], 4, "the prompt is empty"),
        ([[1], [272]], 4, "token ids must be between 0 and 271"),
        ([[1], [1] * 65], 1, "the prompt has 65 tokens, the context is 64"),
        ([[1], [1] * 60], 6, r"60 \+ 6 tokens do not fit the context of 64"),
        ([[1]], 0, "`new_tokens` must be at least 1, got 0"),
    ],
)
def test_batches_that_cannot_run_are_refused(
    make_model: "Callable[..., PackedModel]",
    prompts: list[list[int]],
    new_tokens: int,
    message: str,
) -> None:
    model = exact(make_model())
    before = alone(model, PROMPTS[0])
    with pytest.raises(RequestError, match=message):
        decode_batch(model, prompts, new_tokens)
    assert model.engine.held == [*PROMPTS[0], *before]


def test_the_whole_context_can_be_filled(model: lowbit.Model) -> None:
    full, short = prompts_of(CONTEXT, 3)
    assert decode_batch(model, [full, short], 1) == [alone(model, full, 1), alone(model, short, 1)]
    nearly = full[:-4]
    assert decode_batch(model, [short, nearly], 5)[1] == alone(model, nearly, 5)


def test_caches_that_do_not_fit_are_refused(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, dtype = model.opened, torch.float32
    each = (opened.kv_bytes(13, dtype) + opened.state_bytes(dtype)) * memory.HEADROOM
    batch = start_batch(model, prompts_of(10, 8), 4).cache
    held = [batch.k, batch.v, batch.delta.conv, batch.delta.memory]
    assert sum(t.nbytes for t in held) == pytest.approx(2 * each / memory.HEADROOM)
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(3 * each))
    decode_batch(model, prompts_of(10, 1, 1), 4)
    wanted = r"for 4 sequences of 13 tokens, free on cpu: "
    with pytest.raises(ResourceError, match=wanted) as e:
        decode_batch(model, prompts_of(10, 1, 1, 1), 4)
    assert e.value.hint == "3 of them fit"
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    with pytest.raises(ResourceError) as e:
        decode_batch(model, prompts_of(10), 4)
    assert e.value.hint == "not one of them fits: use fewer tokens"
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    decode_batch(model, prompts_of(10), 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_state_of_several_sequences_is_as_many_states(device: str) -> None:
    ops = {"cpu": cpu, "cuda": cuda}[device]
    torch.manual_seed(0)
    key_heads, heads, dim, taps, B = 1, 2, 16, 4, 3
    channels = (2 * key_heads + heads) * dim
    weights = DeltaWeights(
        conv=torch.randn(channels, taps, device=device),
        decay=-torch.rand(heads, device=device),
        dt_bias=torch.randn(heads, device=device),
        norm=torch.rand(dim, device=device),
        key_heads=key_heads,
        key_dim=dim,
    )
    together = new_delta_state(2, weights, torch.bfloat16, device, B)
    together.conv.normal_()
    together.memory.normal_()
    apart = [together.of(b).clone() for b in range(B)]
    layer = 1
    untouched = together.clone()
    for _ in range(2):
        qkvz = torch.randn(B, channels + heads * dim, device=device).bfloat16()
        ba = torch.randn(B, 2 * heads, device=device).bfloat16()
        if device == "cuda":  # no other kernel lies between: states may be read before the wait
            torch.cuda.synchronize()
        got = ops.delta_net(qkvz, ba, weights, 1e-6, together, layer)
        for b, state in enumerate(apart):
            row = slice(b, b + 1)
            alone = ops.delta_net(qkvz[row], ba[row], weights, 1e-6, state, layer)
            assert torch.equal(got[row], alone)
    for b, state in enumerate(apart):
        assert torch.equal(together.of(b).conv, state.conv)
        assert torch.equal(together.of(b).memory, state.memory)
        assert not torch.equal(together.of(b).memory[layer], untouched.of(b).memory[layer])
    assert torch.equal(together.memory[0], untouched.memory[0])
    assert untouched.sequences == B
    assert isinstance(untouched, DeltaState)


class Graph:
    """What `torch.cuda.graph` fills: the step of a batch with the reach of its capture."""

    replay: Callable[[], None]

    def __init__(self) -> None:
        self.memory = object()

    def pool(self) -> object:
        return self.memory


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batches take the GPU's branch over stand-ins for graphs; the reaches that were captured."""
    reaches: list[int] = []
    step = Batch._step
    recording = []

    @contextmanager
    def graph(recorded: Graph, pool: object) -> Iterator[None]:
        assert (pool is None) == (not reaches)
        recorded.memory = pool or recorded.memory
        recording.append(recorded)
        yield
        assert not recording  # the step came by

    def noted(batch: Batch) -> None:
        reach = batch.cache.reach
        if not recording:
            step(batch)
            return
        assert batch.cache.length == 0  # no prompt is there that a capture could spoil
        reaches.append(reach)

        def replay() -> None:
            assert int(batch.cache.position.max()) == batch.cache.length < reach
            batch.cache.reach = reach
            step(batch)

        recording.pop().replay = replay

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes: dict[str, Any] = {
        "synchronize": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Batch, "_step", noted)
    monkeypatch.setattr(Batch, "on_gpu", property(lambda batch: True))
    return reaches


@pytest.mark.usefixtures("short_reach")
@pytest.mark.parametrize(
    ("lengths", "new_tokens", "expected"),
    [((3, 1), 11, [12, 13]), ((1, 2, 1), 48, [3, 12, 48, 49]), ((40,), 2, [41]), ((7, 9), 1, [])],
)
def test_graphs_are_captured_for_the_reaches_to_come(
    packed: "PackedModel",
    captures: list[int],
    lengths: tuple[int, ...],
    new_tokens: int,
    expected: list[int],
) -> None:
    model = exact(packed)
    prompts = prompts_of(*lengths)
    batch = start_batch(model, prompts, new_tokens)
    assert captures == expected
    assert len({graph.pool() for graph in batch._graphs.values()}) == min(1, len(expected))
    tokens = torch.cat((batch.tokens[None].clone(), batch.decode(new_tokens - 1)))
    assert captures == expected
    assert tokens.T.tolist() == [alone(model, prompt, new_tokens) for prompt in prompts]


def mixed(role: str) -> Scheme:
    return Scheme(4, 128) if role == "mlp" else Scheme(8, 128)


@pytest.mark.usefixtures("short_reach")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_is_as_close_to_fp32_as_one_sequence(
    make: "Callable[..., PackedModel]", device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of two roundings may differ where two are as likely, so logits are compared.

    Each prompt is continued with given tokens: the error of the batch's steps, over all of them,
    against the error of the steps of one sequence.
    """
    packed = make(mixed, **WIDE)
    steps = 12
    forced = prompts_of(*[steps] * len(PROMPTS))
    whole = [[*prompt, *more] for prompt, more in zip(PROMPTS, forced, strict=True)]
    fp32 = exact(packed)
    right = torch.stack([fp32.logits(ids)[-steps:] for ids in whole]).double()
    model = lowbit.load(packed.folder, device=device, context=CONTEXT)
    got = forced_logits(start_batch(model, PROMPTS, steps + 1), torch.tensor(forced))
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 1)  # the kernels of decoding
    single = torch.stack([model.logits(ids)[-steps:] for ids in whole]).double().cpu()
    assert 0 < (got - right).norm() < 1.25 * (single - right).norm()


def forced_logits(batch: Batch, tokens: Tensor) -> Tensor:
    """Logits [B, steps, V] in float64 after each of tokens [B, steps], without graphs."""
    out = []
    for column in tokens.T:
        batch.tokens.copy_(column)
        batch.cache.reach = batch.cache.reach_for(batch.cache.length + 1)
        out.append(batch.decoder.logits(batch.decoder.hidden(batch.tokens, batch.cache)))
        batch.cache.position.add_(1)
        batch.cache.length += 1
    return torch.stack(out, dim=1).double().cpu()


@pytest.mark.gpu
@pytest.mark.usefixtures("short_reach")
def test_the_graphs_give_the_tokens_of_the_step(
    make: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lowbit.load(make(mixed, **WIDE).folder, device="cuda", context=CONTEXT)
    prompts = [*PROMPTS, *prompts_of(2, 44, 11, 7)]
    captured = decode_batch(model, prompts, NEW)
    assert captured == decode_batch(model, prompts, NEW)
    monkeypatch.setattr(Batch, "capture", lambda batch, longest: None)
    monkeypatch.setattr(Batch, "on_gpu", property(lambda batch: False))
    assert captured == decode_batch(model, prompts, NEW)
    assert len(captured[0]) == NEW

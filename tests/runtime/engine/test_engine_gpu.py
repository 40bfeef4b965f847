"""The engine on a GPU: the captured graph against the same step run directly."""

import json
import shutil
import warnings
from collections.abc import Callable, Hashable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.activation_modes import Activations
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, dequantize, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.load_options import KVCache
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.state.step import StepPlan
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS
from tests.conversions import convert
from tests.runtime.conftest import PackedModel
from tests.runtime.dense_embedding import dense_embedding
from tests.runtime.hub_logits import error_ratio, hub_logits, in_bf16

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples"

GREEDY = lowbit.SamplingParams()
SAMPLED = (
    lowbit.SamplingParams(temperature=1.5, seed=1),
    lowbit.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    lowbit.SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3),
)
EVERY = pytest.mark.parametrize("params", [GREEDY, *SAMPLED])
LONG = torch.randint(256, (1020,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPT = LONG[:37]
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def mixed(role: str) -> Scheme:
    return Scheme(4, 128) if role == "mlp" else Scheme(8, 128)


Make = Callable[..., PackedModel]


@pytest.fixture(params=["dense", "hybrid"])
def make(request: pytest.FixtureRequest, make_model: Make, make_qwen3_5: Make) -> Make:
    return make_model if request.param == "dense" else make_qwen3_5


@pytest.fixture
def model(make: Make) -> lowbit.Model:
    """A model whose whole context is one attention length."""
    return lowbit.load(make(mixed, **SIZES).folder, device="cuda")


@pytest.fixture
def long_model(make: Make) -> lowbit.Model:
    """A model whose context has three: 256, 1024 and 2048 rows."""
    folder = make(mixed, **SIZES, max_position_embeddings=2048).folder
    return lowbit.load(folder, device="cuda")


def without_graphs(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on steps are launched kernel by kernel, and nothing is held."""

    def directly(graphs: Graphs, key: Hashable, run: Callable[[], None], *tensors: object) -> None:
        run()

    for way in ("run", "replay"):
        monkeypatch.setattr(Graphs, way, directly)
    model.engine.forget()


def recorded(model: lowbit.Model) -> list[tuple[int, int]]:
    """Tokens and attention length of the recorded steps."""
    keys: Any = model.engine.runner.graphs._graphs
    return [(plan.tokens, plan.max_kv_len) for name, plan, *_ in keys if name == "decode"]


def run(
    model: lowbit.Model, prompt: list[int], params: lowbit.SamplingParams, count: int
) -> list[int]:
    """The answer to a prompt of which nothing is held."""
    model.engine.forget()
    return list(model.engine.generate(prompt, params, count))


@EVERY
def test_the_graph_gives_the_tokens_of_the_step(
    model: lowbit.Model, params: lowbit.SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = run(model, PROMPT, params, 60)
    again = run(model, PROMPT, params, 60)
    assert recorded(model) == [(1, 256)]
    without_graphs(model, monkeypatch)
    assert captured == again == run(model, PROMPT, params, 60)
    assert len(captured) == 60


def test_the_host_waits_for_tokens_alone(long_model: lowbit.Model) -> None:
    """Prompts of several chunks and new batches, once every step is recorded."""

    def ask() -> list[tuple[int, ...]]:
        long_model.engine.forget()
        handles = []
        for place, params in enumerate((GREEDY, *SAMPLED)):
            request = Request(tuple(LONG[place:] * 2)[:1500], params, 30 - 5 * place)
            handles.append(long_model.engine.submit(request))
            for _ in range(5):
                long_model.engine.step()
        return [handle.result() for handle in handles]

    long_model.engine.drafting = None  # whose steps depend on how long others took
    expected = ask()
    ask()  # page-locked memory for everything that is under way
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        assert ask() == expected
    finally:
        torch.cuda.set_sync_debug_mode(before)


@EVERY
@pytest.mark.parametrize(("tokens", "lengths"), [(240, [256, 1024]), (1000, [1024, 2048])])
def test_a_request_that_outgrows_its_graph_captures_another(
    long_model: lowbit.Model,
    params: lowbit.SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    lengths: list[int],
) -> None:
    """In the middle of it: what has been drawn, seen and remembered goes on as it was."""
    captured = run(long_model, LONG[:tokens], params, 60)
    assert recorded(long_model) == [(1, max_kv_len) for max_kv_len in lengths]
    again = run(long_model, LONG[:tokens], params, 60)
    assert recorded(long_model) == [(1, max_kv_len) for max_kv_len in lengths]
    without_graphs(long_model, monkeypatch)
    assert captured == again == run(long_model, LONG[:tokens], params, 60)
    assert len(captured) == 60


@pytest.mark.parametrize("tokens", [37, 240])
def test_greedy_is_the_same_every_time(long_model: lowbit.Model, tokens: int) -> None:
    """Over 20 runs, with other requests between them, and in a model loaded anew."""
    expected = run(long_model, LONG[:tokens], GREEDY, 60)
    for index in range(20):
        if index % 5 == 0:
            run(long_model, LONG[index:500], SAMPLED[index // 5 % 3], 3)
        assert run(long_model, LONG[:tokens], GREEDY, 60) == expected
    loaded = lowbit.load(long_model.folder, device="cuda")
    assert run(loaded, LONG[:tokens], GREEDY, 60) == expected


def test_one_token_is_the_same_after_any_request(long_model: lowbit.Model) -> None:
    """It goes through the kernels of decoding, which divide the cache by its attention length."""

    def one_alone() -> Tensor:
        long_model.engine.forget()
        return long_model.logits(LONG[:1])

    def one_more() -> Tensor:
        long_model.engine.forget()
        long_model.logits(LONG[:300])
        return long_model.engine.logits(LONG[:301], 300)

    first, later = one_alone(), one_more()
    for other in (LONG, PROMPT):
        run(long_model, other, GREEDY, 20)
        assert torch.equal(one_alone(), first)
        run(long_model, other, GREEDY, 20)
        assert torch.equal(one_more(), later)


@pytest.mark.parametrize("at", [1, 2], ids=["step", "capture"])
@pytest.mark.parametrize("tokens", [37, 240])
def test_an_interrupted_capture_is_forgotten(
    long_model: lowbit.Model, monkeypatch: pytest.MonkeyPatch, tokens: int, at: int
) -> None:
    """Ctrl-C while the first graph is captured, or one in the middle of a request."""
    params = SAMPLED[2]
    expected = run(long_model, LONG[:tokens], params, 60)
    last = max(recorded(long_model))
    long_model.engine.runner.graphs = Graphs()
    decode, calls = Runner.run_step, [0]

    def interrupted(runner: Runner, plan: StepPlan) -> None:
        decode(runner, plan)
        calls[0] += (plan.tokens, plan.max_kv_len) == last
        if calls[0] == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(long_model, LONG[:tokens], params, 60)
    assert last not in recorded(long_model)
    assert list(long_model.engine.generate(LONG[:tokens], params, 60)) == expected


def test_the_first_request_may_be_sampled(model: lowbit.Model) -> None:
    """The capture runs a step before the request starts: at temperature 0 it would divide by it."""
    hot = SAMPLED[1]
    tokens = list(model.engine.generate(PROMPT, hot, 30))
    model.engine.forget()
    list(model.engine.generate(PROMPT, GREEDY, 5))
    model.engine.forget()
    assert list(model.engine.generate(PROMPT, hot, 30)) == tokens


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


def test_turns_on_one_cache_are_the_same_without_graphs(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of parameters captures a graph while the cache holds earlier turns."""

    def turns() -> list[tuple[int, list[int]]]:
        model.engine.forget()
        prompt, said = PROMPT, []
        for params in (GREEDY, *SAMPLED, GREEDY):
            handle = model.engine.generate(prompt, params, 20)
            answer = list(handle)
            said.append((handle.reused, answer))
            prompt = [*prompt, *answer[:-1], 7, 8]
        return said

    captured = turns()
    assert all(reused > 0 for reused, _ in captured[1:])
    without_graphs(model, monkeypatch)
    assert captured == turns()


def test_second_turns_after_other_conversations_have_the_same_bits(make_qwen3_5: Make) -> None:
    """Each leaves two snapshots, and the host keeps those of all."""
    folder = make_qwen3_5(mixed, **SIZES, max_position_embeddings=4096).folder
    engine = lowbit.load(folder, device="cuda", max_sequences=1, cache_tokens=20_000).engine
    engine.drafting = None  # so that states stay in the sequence's row
    slots = engine.runner.state.slots
    Turn = tuple[int, list[int], Tensor, Tensor]

    def turn(prompt: list[int]) -> Turn:
        handle = engine.generate(prompt, SAMPLED[1], 20)
        answer = list(handle)
        return handle.reused, answer, slots.memory[:, 1].clone(), slots.conv[:, 1].clone()

    def second(prompt: list[int], first: Turn) -> tuple[int, Turn]:
        """Tokens that had been run before, and the turn."""
        begun = [*prompt, *first[1]]
        return len(begun) - 1, turn([*begun, 7, 8])

    prompts = [(LONG[number:] * 3)[:2500] for number in range(6)]
    alone = []
    for prompt in prompts:
        engine.forget()
        alone.append(second(prompt, turn(prompt))[1])
    engine.forget()
    firsts = [turn(prompt) for prompt in prompts]
    for prompt, first, expected in zip(prompts, firsts, alone, strict=True):
        run_before, found = second(prompt, first)
        assert run_before == found[0] == expected[0]
        assert found[1] == expected[1]
        assert torch.equal(found[2], expected[2])
        assert torch.equal(found[3], expected[3])


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


def test_sequences_together_are_each_as_if_alone(model: lowbit.Model) -> None:
    """Also in graphs of other numbers of sequences, which some of them join and leave midway."""
    asked = [
        (LONG[index : index + length], params, 12 + 5 * index)
        for index, (length, params) in enumerate(
            zip((37, 5, 64, 1, 150, 90, 16, 128), (GREEDY, *SAMPLED) * 2, strict=True)
        )
    ]
    expected = [run(model, *each) for each in asked]
    engine = lowbit.load(model.folder, device="cuda", max_sequences=5).engine
    for order in (1, -1):
        handles = [engine.generate(*each) for each in asked[::order]]
        assert [list(handle) for handle in handles][::order] == expected
        engine.forget()


def test_bf16_is_close_to_the_exact_weights(
    make_model: Callable[..., PackedModel], reference: Callable[[PackedModel], Any]
) -> None:
    packed = make_model(mixed, **SIZES)
    hub = reference(packed)
    exact = hub_logits(hub, PROMPT)
    rounded = hub_logits(in_bf16(hub).cuda(), PROMPT)
    ours = lowbit.load(packed.folder, device="cuda").logits(PROMPT)
    assert error_ratio(ours, rounded, exact) < 1.25


@pytest.mark.parametrize("base", ["int4", "int8", "int3", "int2"])
def test_a_trained_model_is_no_further_from_fp32_than_transformers_in_bf16(
    base: Any,
    tmp_path: Path,
    reference: Callable[[PackedModel], Any],
    set_chunk: Callable[[int], None],
) -> None:
    folder = tmp_path / base
    # The libraries of the GPU alone may take more than the converter allows itself.
    recipe = Recipe(base=base, group_size=128)
    convert(EXAMPLES / "models" / "tiny-qwen3", folder, recipe)
    hub = reference(meaning_of(folder))
    model = lowbit.load(folder, device="cuda")
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    ids = model.tokenizer.encode(text[:8000])[:512]
    with torch.no_grad():
        exact = hub(torch.tensor([ids])).logits[0]
        rounded = hub.to("cuda", torch.bfloat16)(torch.tensor([ids]).cuda()).logits[0]
    allowed = divergence(exact, rounded)
    for chunk in (len(ids), 32, 1):  # the kernels of long prompts, of short ones, of decoding
        set_chunk(chunk)
        assert 0 < divergence(exact, model.logits(ids)) <= 1.05 * allowed


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_long_hybrid_is_no_further_from_fp32_than_transformers_in_bf16(
    tokens: int, tmp_path: Path, reference: Callable[[PackedModel], Any]
) -> None:
    """Chunks of the prompt go on from the state, and from the keys, of those before."""
    source, folder = tmp_path / "source", tmp_path / "int4"
    shutil.copytree(EXAMPLES / "models" / "tiny-qwen3.5", source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = tokens
    (source / "config.json").write_text(json.dumps(config))
    convert(source, folder, Recipe(base="int4", group_size=128))
    hub = reference(meaning_of(folder))
    model = lowbit.load(folder, device="cuda", context=tokens)
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    ids = model.tokenizer.encode(text)[:tokens]
    assert len(ids) == tokens
    with torch.no_grad():
        exact = hub(torch.tensor([ids])).logits[0]
        rounded = hub.to("cuda", torch.bfloat16)(torch.tensor([ids]).cuda()).logits[0]
    assert 0 < divergence(exact, model.logits(ids)) <= 1.05 * divergence(exact, rounded)


def meaning_of(folder: Path) -> PackedModel:
    """A converted folder and what its codes mean in FP32."""
    stored = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(f".{PACKED}") for name in stored if name.endswith(f".{PACKED}")]
    packed = (f".{PACKED}", f".{SCALE}", f".{SHAPE}")
    weights = {name: t.float() for name, t in stored.items() if not name.endswith(packed)}
    for module in modules:
        codes, K = stored[f"{module}.{PACKED}"], int(stored[f"{module}.{SHAPE}"][1])
        bits = codes.shape[1] * 32 // K
        weight = dequantize(unpack(codes, bits, K), stored[f"{module}.{SCALE}"])
        weights[f"{module}.weight"] = weight
    return PackedModel(folder, json.loads((folder / "config.json").read_text()), weights)


def divergence(exact: Tensor, got: Tensor) -> float:
    """Mean KL of the next token's distributions, in nats."""
    p, q = exact.double().log_softmax(-1), got.cpu().double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_weights_of_both_devices_are_the_same(make_model: Callable[..., PackedModel]) -> None:
    folder = make_model(mixed, **SIZES).folder
    on_gpu = lowbit.load(folder, device="cuda").engine.decoder
    exact = lowbit.load(folder, device="cpu", dtype=torch.float32).engine.decoder
    for ours, theirs in zip(on_gpu.layers, exact.layers, strict=True):
        for name in ("qkv", "o", "mlp.gate_up", "mlp.down"):
            packed = attrgetter(name)(ours)
            assert isinstance(packed, TiledLinear)
            assert torch.equal(dequantized(packed).cpu(), attrgetter(name)(theirs).weight)
    assert torch.equal(dense_embedding(on_gpu).float().cpu(), dense_embedding(exact))


def left_by(
    engine: Engine, params: lowbit.SamplingParams, count: int, others: int
) -> tuple[Tensor, ...]:
    """Tokens, keys and values of a sequence that so many others run beside."""
    engine.forget()
    watched = engine.submit(Request(tuple(LONG[:20]), params, count + 1))
    beside = [
        engine.submit(Request(tuple(LONG[n : 25 + 2 * n]), SAMPLED[0], 2 * count))
        for n in range(others)
    ]
    sequence = watched._sequence
    while len(sequence.output) < count:
        engine.step()
    torch.cuda.synchronize()
    state, pages = engine.runner.state, torch.tensor(sequence.pages)
    found = [torch.tensor(sequence.output[:count])]
    for store in state.pages.stores:
        found.append(store[:, pages].flatten(1, 2)[:, : 19 + count].clone())
    for handle in (watched, *beside):
        handle.cancel()
    engine.step()
    return tuple(found)


@pytest.mark.parametrize("kv_cache", ["bf16", "int8"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED[1]])
def test_a_sequence_has_the_same_bits_among_63_others(
    make: Make, params: lowbit.SamplingParams, kv_cache: KVCache
) -> None:
    """It leaves the same tokens, keys and values, short and with more keys than 256."""
    sizes = SIZES | {"num_key_value_heads": 4, "max_position_embeddings": 1024}
    folder = make(mixed, **sizes).folder
    model = lowbit.load(folder, device="cuda", max_sequences=EXACT_TOKENS, kv_cache=kv_cache)
    model.engine.drafting = None
    alone = left_by(model.engine, params, 300, others=0)
    for others in (15, 16, 32, EXACT_TOKENS - 1):
        for one, other in zip(alone, left_by(model.engine, params, 300, others), strict=True):
            assert torch.equal(one, other), others


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED[1]])
def test_a_sequence_has_the_same_bits_among_255_others(
    make: Make, params: lowbit.SamplingParams, activations: Activations
) -> None:
    """In a part of a step, and where all of a step pass the layers together."""
    folder = make(mixed, **SIZES | {"max_position_embeddings": 1024}).folder
    model = lowbit.load(folder, device="cuda", max_sequences=STEP_TOKENS, activations=activations)
    engine, together = model.engine, {"exact": EXACT_TOKENS, "int8": STEP_TOKENS}
    assert engine.runner.part_tokens == together[activations]
    engine.drafting = None
    alone = left_by(engine, params, 60, others=0)
    for others in (EXACT_TOKENS, 100, STEP_TOKENS - 1):
        for one, other in zip(alone, left_by(engine, params, 60, others), strict=True):
            assert torch.equal(one, other), others

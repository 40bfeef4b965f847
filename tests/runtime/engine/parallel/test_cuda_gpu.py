"""Two ranks answer as one does: on two GPUs, or on one that takes their kernels in turn."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends import symmetric
from lowbit.runtime.cli.notes import THROUGH_HOST, note_choices
from lowbit.runtime.engine.parallel import members

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "examples" / "models"
GREEDY = lowbit.SamplingParams()
IDS = torch.randint(4000, (400,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [IDS[:5], IDS[5:105], IDS[60:370], IDS[9:10]]
COUNT = 24
SIZES: dict[str, Any] = {"device": "cuda", "context": 512, "max_sequences": 4}
PACKED: dict[str, Any] = {"quantize": "int4", "group_size": 64}
GPUS = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
TWO: dict[str, Any] = {"tensor_parallel": 2, "devices": GPUS}
CLOSE = 0.03  # of the largest logit: what sums in another order may change in BF16
ENDED = r"rank 1 \(process \d+\) ended while running steps: signal SIGKILL"
NAMES = ("tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe", "tiny-qwen3.5-moe")


PAIRS = [*NAMES, "tiny-qwen3 int8 cache", "tiny-qwen3 bf16"]
PAIRS += [f"{name} int8 activations" for name in NAMES[:2]]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[lowbit.Model, lowbit.Model]]:
    """A model in one process, and in two."""
    name, _, rest = request.param.partition(" ")
    options = {**SIZES, **({} if rest == "bf16" else PACKED)}
    options["kv_cache"] = "int8" if rest == "int8 cache" else "bf16"
    options["activations"] = "int8" if rest == "int8 activations" else "exact"
    one = lowbit.load(MODELS / name, speculate="off", **options)
    with closing(one), closing(lowbit.load(MODELS / name, **options, **TWO)) as two:
        yield one, two
    assert two.crew is not None
    assert all(member.process.poll() is not None for member in two.crew.members)


def assert_same(one: lowbit.Model, prompt: list[int], a: list[int], b: list[int]) -> None:
    """Answers are the same up to two tokens that are about as likely."""
    if a == b:
        return
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    logits = one.logits([*prompt, *a[:at]])[-1].float()
    gap = float((logits[a[at]] - logits[b[at]]).abs())
    assert gap <= 2 * CLOSE * float(logits.abs().max()), f"token {at}: {a[at]} and {b[at]}"


@pytest.mark.parametrize(("ranks", "way"), [(2, "peers"), (3, "peers"), (2, "host")])
def test_exchanges_of_processes(tmp_path: Path, ranks: int, way: str) -> None:
    program = "tests.runtime.engine.parallel.exchange_rank"
    devices = ",".join(map(str, GPUS if ranks == 2 else [0] * ranks))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program, str(rank), str(ranks), devices, str(tmp_path), way],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for rank in range(ranks)
    ]
    found = [each.communicate(timeout=240)[0] for each in processes]
    assert [each.returncode for each in processes] == [0] * ranks
    for each in map(json.loads, found):
        print(f"microseconds of exchanges: {each['us']}")
        assert each["wrong"] == []


def test_logits(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    one, two = pair
    for prompt in PROMPTS:
        a, b = one.logits(prompt), two.logits(prompt)
        assert a.shape == b.shape
        far = (a - b).abs().amax(1) > CLOSE * a.abs().max()
        # Where two experts are about as likely, other bits may choose the other one.
        assert float(far.float().mean()) <= (0.03 if one.opened.config.experts else 0)


def test_requests_one_by_one_and_together(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    one, two = pair
    expected = [list(one.engine.generate(prompt, GREEDY, COUNT)) for prompt in PROMPTS]
    two.engine.forget()
    alone = []
    for prompt in PROMPTS:
        alone.append(list(two.engine.generate(prompt, GREEDY, COUNT)))
        two.engine.forget()
    for prompt, a, b in zip(PROMPTS, expected, alone, strict=True):
        assert_same(one, prompt, a, b)
    handles = [two.engine.generate(prompt, GREEDY, COUNT) for prompt in PROMPTS]
    assert [list(handle) for handle in handles] == alone


def test_a_prefix_that_is_reused_and_sampled_tokens(
    pair: tuple[lowbit.Model, lowbit.Model],
) -> None:
    one, two = pair
    answer = list(two.engine.generate(PROMPTS[2], GREEDY, COUNT))
    prompt = [*PROMPTS[2], *answer, *PROMPTS[1][:30]]  # prefixes end where chunks and answers do
    handle = two.engine.generate(prompt, GREEDY, COUNT)
    reused = list(handle)
    assert handle.reused > 0
    assert_same(one, prompt, list(one.engine.generate(prompt, GREEDY, COUNT)), reused)
    drawn = lowbit.SamplingParams(temperature=0.8, top_k=20, seed=5, repetition_penalty=1.2)
    tokens = list(two.engine.generate(PROMPTS[0], drawn, COUNT))
    assert list(two.engine.generate(PROMPTS[0], drawn, COUNT)) == tokens


def test_log_probabilities_of_a_prompt(pair: tuple[lowbit.Model, lowbit.Model]) -> None:
    one, two = pair
    a, b = one.score(PROMPTS[1]), two.score(PROMPTS[1])
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x is not None
        assert y is not None
        assert abs(x.chosen - y.chosen) < 0.5


def test_models_one_after_the_other() -> None:
    """The first rank has exchanged buffers before; the second model's other rank is new."""
    tokens = []
    for _ in range(2):
        with closing(lowbit.load(MODELS / "tiny-qwen3", **SIZES, **PACKED, **TWO)) as model:
            tokens.append(list(model.engine.generate(PROMPTS[0], GREEDY, 4)))
    assert tokens[0] == tokens[1]


def answers(
    speculate: str, activations: str
) -> tuple[list[list[int]], list[lowbit.Speculated | None]]:
    """Answers of two ranks to two requests at a time, and to the first one alone."""
    options = {**SIZES, **PACKED, **TWO, "speculate": speculate, "activations": activations}
    with closing(lowbit.load(MODELS / "tiny-qwen3.5", **options)) as model:
        handles = [model.engine.generate(ids, GREEDY, 40) for ids in (IDS[:6] * 10, PROMPTS[1])]
        together = [list(handle) for handle in handles]
        model.engine.forget()
        handles.append(model.engine.generate(IDS[:6] * 10, GREEDY, 40))
        return [*together, list(handles[-1])], [handle.speculation for handle in handles]


@pytest.fixture(scope="module", params=["exact", "int8"])
def plain(request: pytest.FixtureRequest) -> tuple[str, list[list[int]]]:
    """Inputs of linears, and the answers without drafts."""
    return request.param, answers("off", request.param)[0]


def test_a_token_alone_is_that_of_a_step_of_two(plain: tuple[str, list[list[int]]]) -> None:
    """Its sums are pushed by the products; those of two tokens by launches of their own."""
    _, (first, _, alone) = plain
    assert differing(first, alone) == []


@pytest.mark.parametrize("speculate", ["ngram", "mtp", "auto"])
def test_drafts_change_no_token(plain: tuple[str, list[list[int]]], speculate: str) -> None:
    activations, expected = plain
    found, counts = answers(speculate, activations)
    different = [differing(a, b) for a, b in zip(expected, found, strict=True)]
    assert different == [[], [], []], counts
    assert speculate != "mtp" or all(each is not None and each.rounds for each in counts)


def differing(a: list[int], b: list[int]) -> list[tuple[int, int, int]]:
    """The first places at which two answers differ, with the tokens of both."""
    pairs = zip(range(len(a)), a, b, strict=True)
    return [(at, x, y) for at, x, y in pairs if x != y][:3]


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-qwen3.5-moe"])
def test_a_large_step_with_inputs_in_eight_bits_has_the_tokens_of_lone_ones(name: str) -> None:
    """All of it passes the layers and the exchanges together."""
    options = {**SIZES, **PACKED, **TWO, "max_sequences": 100, "activations": "int8"}
    with closing(lowbit.load(MODELS / name, **options)) as model:
        engine, prompts = model.engine, [IDS[i : i + 3 + i % 4] for i in range(100)]
        assert engine.runner.part_tokens > len(prompts)
        handles = [engine.generate(prompt, GREEDY, 8) for prompt in prompts]
        made = [list(handle) for handle in handles]
        for i in range(0, 100, 9):
            engine.forget()
            assert list(engine.generate(prompts[i], GREEDY, 8)) == made[i]


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-qwen3.5-moe"])
def test_experts_with_inputs_in_eight_bits(name: str) -> None:
    """Far tokens are those whose experts are others; two kinds of rounding choose more of them."""
    options = {**SIZES, **PACKED, "activations": "int8"}
    one = lowbit.load(MODELS / name, speculate="off", **options)
    with closing(one), closing(lowbit.load(MODELS / name, **options, **TWO)) as two:
        a, b = one.logits(PROMPTS[2]), two.logits(PROMPTS[2])
        far = (a - b).abs().amax(1) > CLOSE * a.abs().max()
        print(f"{name}: {float(far.float().mean()):.3f} far")
        assert float(far.float().mean()) < 0.15
        assert float((a - b).norm() / a.norm()) < 0.1


@pytest.mark.parametrize("under_way", [False, True])
def test_a_killed_process_ends_all(under_way: bool) -> None:
    with closing(lowbit.load(MODELS / "tiny-qwen3", **SIZES, **PACKED, **TWO)) as model:
        assert model.crew is not None
        handle = model.engine.generate(PROMPTS[0], GREEDY, 200)
        for _ in range(5 if under_way else 0):
            next(handle)
        model.crew.members[0].process.kill()
        with pytest.raises(ResourceError, match=ENDED):
            list(handle)
        with pytest.raises(ResourceError, match=ENDED):
            list(model.engine.generate(PROMPTS[0], GREEDY, 2))
        assert model.crew.problem is not None


def test_a_stopped_process_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "STOPPED_S", 1.0)
    with closing(lowbit.load(MODELS / "tiny-qwen3", **SIZES, **PACKED, **TWO)) as model:
        assert model.crew is not None
        handle = model.engine.generate(PROMPTS[0], GREEDY, 200)
        next(handle)
        model.crew.members[0].process.send_signal(signal.SIGSTOP)
        with pytest.raises(ResourceError, match=r"rank 1 .* was stopped while running steps"):
            list(handle)


def test_gpus_that_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They exchange through the host's memory, and give the same tokens."""
    answers = []
    for reaches in (True, False):
        monkeypatch.setattr(symmetric, "reach_each_other", lambda _, reaches=reaches: reaches)
        with closing(lowbit.load(MODELS / "tiny-qwen3", **SIZES, **PACKED, **TWO)) as model:
            assert model.crew is not None
            assert model.crew.through_host is not reaches
            note_choices(model)
            assert (THROUGH_HOST in capsys.readouterr().err) is not reaches
            answers.append(list(model.engine.generate(PROMPTS[2], GREEDY, COUNT)))
    assert answers[0] == answers[1]


def test_refusals() -> None:
    with pytest.raises(ResourceError, match="2 processes need as many GPUs, up to number 63"):
        lowbit.load(MODELS / "tiny-qwen3", **SIZES, tensor_parallel=2, devices=(0, 63))

"""Masked rows in CUDA graphs, and log-probabilities of prompts, on a GPU."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.engine import scoring
from lowbit.runtime.engine.draft.verify import VerifiedRound
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.plan import CHUNK
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.text.constraint import Constraint
from tests.runtime.conftest import PackedModel
from tests.runtime.engine.draft.guesses import drafting_by, guessers

pytestmark = pytest.mark.gpu

SAMPLED = (
    lowbit.SamplingParams(),
    lowbit.SamplingParams(1.5, seed=1),
    lowbit.SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    lowbit.SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3, logprobs=3),
)
LONG = torch.randint(256, (1200,), generator=torch.Generator().manual_seed(2)).tolist()
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
V = 261


@dataclass
class Residues(Constraint):
    """The id of a token leaves the remainder that the tokens before it give; some are free."""

    fails_at: int = 1000
    done_at: int = 1000
    free_tokens: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.done_at

    def mask(self) -> Tensor | None:
        if len(self.tokens) == self.fails_at:
            raise RequestError("no more")
        if len(self.tokens) % 5 == 4:
            return None
        bits = torch.arange(288) % 7 == sum(self.tokens) % 7
        return (bits.view(9, 32).long() << torch.arange(32)).sum(1).to(torch.int32)

    def accept(self, token: int) -> None:
        self.tokens.append(token)


def follows(tokens: tuple[int, ...]) -> bool:
    return all(n % 5 == 4 or t % 7 == sum(tokens[:n]) % 7 for n, t in enumerate(tokens))


@pytest.fixture(params=["dense", "hybrid"])
def model(
    request: pytest.FixtureRequest,
    make_model: Callable[..., PackedModel],
    make_qwen3_5: Callable[..., PackedModel],
) -> lowbit.Model:
    make = make_model if request.param == "dense" else make_qwen3_5

    def mixed(role: str) -> Scheme:
        return Scheme(4, 128) if role == "mlp" else Scheme(8, 128)

    folder = make(mixed, **SIZES).folder
    model = lowbit.load(folder, device="cuda", max_sequences=5, speculate="ngram")
    model.engine.drafting = None
    return model


def request_of(n: int, bound: bool, count: int = 40) -> Request:
    """The nth of some requests; attention goes beyond 256 tokens within the later ones."""
    prompt = tuple(LONG[n : n + (37, 240, 5, 250, 64, 1)[n % 6]])
    constraint = Residues() if bound else None
    return Request(prompt, SAMPLED[n % 4], count + n, constraint=constraint)


def test_masked_rows_in_graphs_choose_as_without(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(n: int) -> tuple[int, ...]:
        model.engine.forget()
        return model.engine.submit(request_of(n, True)).result()

    captured = [run(n) for n in (0, 1, 3)]
    assert [len(tokens) for tokens in captured] == [40, 41, 43]
    assert all(map(follows, captured))
    keys: Any = model.engine.runner.graphs._graphs
    assert {name for name, *_ in keys} == {"forward", "choose"}
    assert run(1) == captured[1]

    def directly(graphs: Graphs, key: Hashable, run: Callable[[], None], *tensors: object) -> None:
        run()

    monkeypatch.setattr(Graphs, "run", directly)
    assert [run(n) for n in (0, 1, 3)] == captured


def test_requests_beside_masked_ones_are_as_if_alone(model: lowbit.Model) -> None:
    """They join and leave steps with and without masks; one fails, and one is cancelled."""
    bound = {0, 1, 3, 6, 7, 10}
    alone = []
    for n in range(12):
        model.engine.forget()
        alone.append(model.engine.submit(request_of(n, n in bound)).result())
    model.engine.forget()
    for order in (1, -1):
        constraint = Residues(fails_at=9)
        failing = model.engine.submit(
            Request(tuple(LONG[:20]), SAMPLED[1], 30, constraint=constraint)
        )
        handles = [model.engine.submit(request_of(n, n in bound)) for n in range(12)[::order]]
        dropped = model.engine.submit(request_of(4, True))
        next(dropped)
        dropped.cancel()
        found = [handle.result() for handle in handles][::order]
        assert found == alone
        with pytest.raises(RequestError, match="no more"):
            failing.result()
        assert follows(tuple(constraint.tokens))
        assert len(constraint.tokens) == 9
        model.engine.forget()
    for n in bound:
        assert follows(alone[n])


@dataclass
class Foreseen(Residues):
    """It can be copied, and knows its answer but for some guesses."""

    truth: tuple[int, ...] = ()
    wrong: int = 1000  # every so many guesses

    def copy(self) -> "Foreseen":
        return replace(self, tokens=list(self.tokens))

    def forced(self, most: int) -> list[int]:
        at = len(self.tokens)
        return [
            (id + 7 * (n % self.wrong == self.wrong - 1)) % V
            for n, id in enumerate(self.truth[at : at + most], start=at)
        ]


@pytest.mark.parametrize("wrong", [1000, 5, 2, 1])
def test_drafts_under_masks_change_no_token(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Alone and among others, in graphs and without; by the constraint and by a drafter."""
    bound = {0, 1, 3, 6, 7}
    plain = []
    for n in range(8):
        model.engine.forget()
        plain.append(model.engine.submit(request_of(n, n in bound)).result())
    prompts = {request_of(n, False).prompt: plain[n] for n in range(8)}

    def ask(n: int, knows: bool) -> lowbit.Handle:
        request = request_of(n, False)
        if n in bound:
            truth = plain[n] if knows else ()
            request = replace(request, constraint=Foreseen(truth=truth, wrong=wrong))
        return model.engine.submit(request)

    def check(knows: bool) -> None:
        drafter = None if knows else guessers(prompts, seed=wrong)
        runner = model.engine.runner
        most = 15 if runner.spare is None else len(runner.spare)
        model.engine.drafting = drafting_by(drafter, runner, most)
        for n in (0, 1, 3):
            model.engine.forget()
            handle = ask(n, knows)
            assert handle.result() == plain[n]
            assert handle.tally.rounds > 0
        model.engine.forget()
        handles = [ask(n, knows) for n in range(8)]
        assert [handle.result() for handle in handles] == plain

    check(knows=True)
    drafting: Any = model.engine.drafting
    assert {"layers", "choice"} <= {key[0] for key in drafting.verifier.graphs._graphs}
    check(knows=False)

    def directly(graphs: Graphs, key: Hashable, run: Callable[[], None], *tensors: object) -> None:
        run()

    monkeypatch.setattr(Graphs, "run", directly)
    check(knows=True)


def test_forced_tokens_come_in_rounds(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step finds that tokens are forced; a round brings them with what follows."""
    request = request_of(0, False)
    truth = model.engine.submit(replace(request, constraint=Foreseen())).result()
    runner = model.engine.runner
    most = 15 if runner.spare is None else len(runner.spare)
    sent: list[str] = []
    for owner, name in ((Runner, "forward"), (VerifiedRound, "run")):
        method: Any = getattr(owner, name)

        def noted(*given: Any, name: str = name, method: Any = method) -> Any:
            sent.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, noted)
    model.engine.drafting = drafting_by(None, runner, most)
    model.engine.forget()
    handle = model.engine.submit(replace(request, constraint=Foreseen(truth=truth)))
    assert handle.result() == truth
    assert handle.tally.accepted == handle.tally.drafted
    assert sent.count("forward") <= 1
    assert sent.count("run") <= 1 + len(truth) // (most + 1)


def test_log_probabilities_do_not_see_the_mask(model: lowbit.Model) -> None:
    handle = model.engine.submit(request_of(3, True))
    tokens = handle.result()
    prompt = request_of(3, True).prompt
    expected = model.engine.logits([*prompt, *tokens], len(prompt) - 1)[:-1, :V].double()
    expected = expected.log_softmax(-1).cpu()
    for at, found in enumerate(handle.log_probabilities):
        assert abs(found.chosen - float(expected[at, tokens[at]])) < 0.1  # of other kernels


def test_a_released_request_goes_on_in_whole_steps(model: lowbit.Model) -> None:
    request = Request(tuple(LONG[:30]), SAMPLED[2], 30, constraint=Residues(done_at=4))
    tokens = model.engine.submit(request).result()
    assert follows(tokens[:4])
    assert not follows(tokens)
    keys: Any = model.engine.runner.graphs._graphs
    assert {name for name, *_ in keys} == {"forward", "choose", "decode"}


def test_scores_are_those_of_the_logits(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.engine.forget()
    expected = model.logits(LONG).double().log_softmax(-1).cpu()
    # Of fewer rows, a logit below 8 may be rounded the other way, to the next BF16 value 2^-5 away,
    # and so may all that it is compared with.
    for rows, bound in ((CHUNK, 1e-5), (128, 2 * 2**-5)):
        monkeypatch.setattr(scoring, "ROWS", rows)
        running = model.engine.submit(request_of(2, True, 200))
        next(running)
        found = model.score(LONG, top=2)
        for at, one in enumerate(found[1:], start=1):
            assert one is not None
            assert abs(one.chosen - float(expected[at - 1, LONG[at]])) <= bound
            best = expected[at - 1].topk(2).values
            for (_, value), other in zip(one.top, best.tolist(), strict=True):
                assert value == pytest.approx(other, rel=0, abs=bound)

"""Drafts behind images: what makes them sees the embeddings and angles that the model sees."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.mtp import MtpRounds
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.images.positions import positions_of
from lowbit.runtime.models.qwen3_5_mtp import MtpHead
from tests.drafters import write_drafter
from tests.runtime.conftest import PackedModel
from tests.runtime.engine.draft.guesses import costs_by_tokens
from tests.runtime.engine.draft.test_mtp import embeddings_of, head_of_transformers
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.short_models import Shorten

GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
IMAGE = 255  # token
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "context": 400, "max_sequences": 8}


def prompt_of(hidden: int, *parts: int | tuple[int, int], seed: int = 0) -> Request:
    """A request of so many random tokens, and images of so many rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(250, (part,), generator=generator).tolist()
            continue
        rows, columns = part
        embeddings = 0.05 * torch.randn(rows * columns, hidden, generator=generator)
        spans.append(ImageSpan(len(ids), rows, columns, embeddings, bytes([seed, len(ids)])))
        ids += [IMAGE] * (rows * columns)
    return Request(tuple(ids), GREEDY, 14, images=tuple(spans))


@dataclass
class Answers:
    """Answers of a model without drafts.

    Attributes:
        alone: answers to `requests`.
        turns: answers to every other of them in the turn after.
    """

    alone: list[Handle]
    turns: list[Handle]


@pytest.fixture(scope="module")
def answers(shorten: Shorten) -> Answers:
    plain = lowbit.load(shorten("tiny-qwen3.5"), device="cpu", speculate="off", **OPTIONS)
    alone = [plain.engine.submit(request) for request in requests()]
    for each in alone:
        each.result()
    turns = []
    for request, answer in list(zip(requests(), alone, strict=True))[::2]:
        turns.append(plain.engine.submit(turn_after(request, answer.result())))
        turns[-1].result()
    return Answers(alone, turns)


@pytest.fixture
def drafting(
    request: pytest.FixtureRequest, shorten: Shorten, tmp_path_factory: pytest.TempPathFactory
) -> lowbit.Model:
    folder, drafter = shorten("tiny-qwen3.5"), None
    if request.param == "dflash":
        drafter = tmp_path_factory.mktemp("drafter")
        section = {"mask_token_id": 1000, "target_layer_ids": [0]}
        write_drafter(drafter, dflash_config=section, num_target_layers=2)
    return lowbit.load(folder, device="cpu", speculate=request.param, drafter=drafter, **OPTIONS)


def requests() -> list[Request]:
    """Prompts with images and without."""
    asked = [
        prompt_of(256, 20, (3, 5), 30, (1, 9), 4),
        replace(prompt_of(256, (7, 2), 9, seed=1), sampling=HOT),
        replace(prompt_of(256, 40, seed=2), sampling=HOT),
        replace(prompt_of(256, 5, (9, 8), 30, seed=3), sampling=STRICT),
    ]
    again = asked[0].prompt[:20] * 2  # for copies of earlier tokens
    return [*asked, replace(asked[0], prompt=(*asked[0].prompt, *again))]


def turn_after(request: Request, answer: tuple[int, ...]) -> Request:
    return replace(request, prompt=(*request.prompt, *answer, 9, 8), max_new_tokens=4)


def assert_same(found: Handle, expected: Handle) -> None:
    assert found.result() == expected.result()
    assert found.log_probabilities == expected.log_probabilities


@pytest.mark.commands  # what the head reads is compared with transformers below
@pytest.mark.parametrize(
    ("drafting", "graphs"),
    [("mtp", False), ("mtp", True), ("ngram", False), ("dflash", True)],
    ids=["mtp-cpu", "mtp-graphs", "ngram-cpu", "dflash-graphs"],
    indirect=["drafting"],
)
def test_drafts_change_nothing(
    drafting: lowbit.Model, graphs: bool, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, together, and in a turn that goes on from what rounds have left."""
    if graphs:
        run_through_graphs(drafting, monkeypatch)
    assert isinstance(drafting.engine.drafting, Drafts)
    drafting.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    rounds = 0
    some = zip(requests()[::2], answers.alone[::2], answers.turns, strict=True)
    for request, expected, turn in some:
        found = drafting.engine.submit(request)
        assert_same(found, expected)
        rounds += found.tally.rounds
        found = drafting.engine.submit(turn_after(request, found.result()))
        assert_same(found, turn)
        assert found.reused
    assert rounds >= 3
    drafting.engine.forget()
    together = [drafting.engine.submit(request) for request in requests()]
    for found, expected in zip(together, answers.alone, strict=True):
        assert_same(found, expected)


@dataclass
class Head:
    """Inputs and outputs of a head at positions of a sequence."""

    taken: dict[int, Tensor] = field(default_factory=dict)
    given: dict[int, Tensor] = field(default_factory=dict)
    prompts: int = 0  # positions that were read with their prompt

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        hidden = MtpHead.hidden

        def noted(
            head: Any, ids: Tensor, x: Tensor, state: Any, step: Any, own: bool = False
        ) -> Tensor:
            found = hidden(head, ids, x, state, step, own)
            if not own:
                positions = step.positions.tolist()
                self.taken |= dict(zip(positions, x, strict=True))
                self.given |= dict(zip(positions, found, strict=True))
                self.prompts += len(x) if step.axes is not None else 0
            return found

        patch.setattr(MtpHead, "hidden", noted)


@pytest.mark.parametrize("chunk", [512, 23])
def test_the_head_reads_images_as_its_model_does(
    chunk: int,
    make_qwen3_5: Callable[..., PackedModel],
    set_chunk: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against transformers: prompt and answer, in which it goes on with the delta."""
    set_chunk(chunk)
    packed = make_qwen3_5(mtp_num_hidden_layers=1)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32, speculate="mtp")
    assert isinstance(model.engine.drafting, Drafts)
    model.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    head, request = Head(), prompt_of(64, 20, (3, 5), 20, (4, 2), 1, (1, 3), 6)
    head.watch(monkeypatch)
    answer = model.engine.submit(request).result()
    ids = torch.tensor([*request.prompt, *answer])
    embedded = embeddings_of(packed, ids)
    for span in request.images:
        assert isinstance(span.embeddings, Tensor)
        embedded[span.start : span.stop] = span.embeddings
    count = max(head.given) + 1
    assert head.given.keys() == set(range(count))
    assert count > len(request.prompt) + 8
    decoder: Any = model.engine.decoder
    norm, eps = decoder.ops.rms_norm, decoder.config.rms_norm_eps
    taken, given = (
        torch.stack([each[n] for n in range(count)]) for each in (head.taken, head.given)
    )
    axes = positions_of(len(ids), request.images).axes[:, :count]
    hidden = norm(taken, decoder.norm, eps)
    expected = head_of_transformers(packed, embedded[1 : count + 1], hidden, axes)
    found = norm(given, decoder.mtp.norm, eps)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_head_that_reads_ends_of_prompts_leaves_images_out(
    make_qwen3_5: Callable[..., PackedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It catches up by ids and by the angles of the answer, which are not those of an image."""
    packed = make_qwen3_5(mtp_num_hidden_layers=1)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    model = lowbit.load(packed.folder, speculate="mtp", **options)
    drafting: Any = model.engine.drafting
    assert isinstance(drafting.made, MtpRounds)
    plain = lowbit.load(packed.folder, **options)
    head = Head()
    head.watch(monkeypatch)
    for parts, first in (((20, (3, 5), 9), 35), ((20, (3, 5)), 34), ((9, (3, 5), 80), 88)):
        model.engine.forget()
        head.given.clear()
        drafting.suspended = True
        request = prompt_of(64, *parts)
        found = model.engine.submit(request)
        assert found.result() == plain.engine.submit(request).result()
        assert not drafting.suspended
        assert min(head.given) == first
    assert head.prompts == 0

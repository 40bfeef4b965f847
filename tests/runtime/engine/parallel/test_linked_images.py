"""Images of a model that ranks share as GPUs do: every rank's chunks have them; here on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime import SamplingParams
from lowbit.runtime.engine.chunks import Chunks
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel.link import GpuLink, unembedded
from lowbit.runtime.engine.parallel.messages import decoded, encoded
from lowbit.runtime.engine.parallel.tasks import RunChunk
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.models.loader import OpenedModel, load_decoder, open_model
from lowbit.runtime.state.step import Embedded, StepPlan
from tests.lanes import in_commands
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.runtime.engine.graph_stand_in import PaddedLayers
from tests.runtime.engine.small_engine import CONTEXT, SMALL, assert_all_free
from tests.runtime.ranks_in_threads import ThreadCrew, linked_runner

GREEDY = SamplingParams(logprobs=2)
COUNT = 9
END = 250  # ends a message, behind which a chunk begins
H = 64
GENERATOR = torch.Generator().manual_seed(6)
IDS = torch.randint(200, (150,), generator=GENERATOR).tolist()


def picture(start: int, rows: int, columns: int, seed: int) -> ImageSpan:
    found = torch.randn(rows * columns, H, generator=torch.Generator().manual_seed(seed))
    return ImageSpan(start, rows, columns, found, bytes([seed]))


def asked(ids: list[int], *images: ImageSpan) -> Request:
    return Request(tuple(ids), GREEDY, COUNT, images=images, message_ends=frozenset({END}))


TEXT = asked(IDS[:9])
ONE = asked([*IDS[:70], END], picture(5, 2, 3, 1))
# Two side by side, one that a chunk ends in, text behind them, and one at the end
FOUR = asked(
    IDS[:120],
    *(picture(*each) for each in ((3, 2, 2, 2), (7, 1, 5, 3), (30, 5, 6, 4), (114, 2, 3, 5))),
)
ASKED = (TEXT, ONE, FOUR)


@pytest.fixture
def opened(make_model: Callable[..., PackedModel]) -> OpenedModel:
    return open_model(make_model(**QWEN3_5, intermediate_size=128).folder)


@pytest.fixture
def one(opened: OpenedModel) -> Engine:
    decoder = load_decoder(opened, "cpu", torch.float32, CONTEXT)
    return Engine(new_runner(decoder, 261, SMALL, torch.float32, "cpu"))


@pytest.fixture
def shared(opened: OpenedModel) -> tuple[Engine, Runner, ThreadCrew]:
    """An engine of two ranks, the other rank's runner, and the way to it."""
    runner, (other,), crew = linked_runner(opened, 2, SMALL)
    return Engine(runner), other, crew


def said(engine: Engine, *requests: Request) -> list[tuple[list[int], list[Any]]]:
    """Tokens of requests together, and the bits of their log-probabilities."""
    handles = [engine.submit(each) for each in requests]
    return [(list(each), list(each.log_probabilities)) for each in handles]


def tokens(engine: Engine, request: Request) -> list[int]:
    engine.forget()
    return said(engine, request)[0][0]


@in_commands("37")
@pytest.mark.parametrize("chunk", [512, 37])
def test_answers_are_those_of_one(
    chunk: int,
    one: Engine,
    shared: tuple[Engine, Runner, ThreadCrew],
    set_chunk: Callable[[int], None],
) -> None:
    set_chunk(chunk)
    engine, other, _ = shared
    for each in ASKED:
        found = engine.logits(each.prompt, images=each.images)
        expected = one.logits(each.prompt, images=each.images)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert tokens(engine, each) == tokens(one, each)
        assert torch.equal(other.shifts, engine.runner.shifts)
    assert engine.runner.shifts.any()


def test_company_and_what_is_reused_change_no_bit(
    shared: tuple[Engine, Runner, ThreadCrew],
) -> None:
    engine, _, _ = shared
    alone = []
    for each in ASKED:
        engine.forget()
        alone += said(engine, each)
    engine.forget()
    assert said(engine, *ASKED) == alone
    engine.forget()
    assert said(engine, *reversed(ASKED)) == alone[::-1]
    more = replace(ONE, prompt=(*ONE.prompt, *IDS[70:90]))
    engine.forget()
    fresh = said(engine, more)
    engine.forget()
    said(engine, ONE)
    handle = engine.submit(more)
    assert [(list(handle), list(handle.log_probabilities))] == fresh
    assert handle.reused > ONE.images[0].stop
    assert_all_free(engine)


class Recorded:
    """A graph that runs its step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step

    def pool(self) -> None: ...


@pytest.mark.commands
def test_chunks_are_padded_and_replayed_on_all_ranks(
    one: Engine, shared: tuple[Engine, Runner, ThreadCrew], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(graphs: Any, key: Any, step: Any) -> None:
        graphs._graphs[key] = Recorded(step)

    monkeypatch.setattr(Graphs, "_record", record)
    engine, other, _ = shared
    expected = [tokens(one, each) for each in ASKED]
    kinds = []
    for runner in (engine.runner, other):
        parts = runner.decoder, PaddedLayers(runner), runner.tables, Graphs()
        runner.chunks = Chunks(*parts, longer=True)
    for _ in range(3):
        assert [tokens(engine, each) for each in ASKED] == expected
    for runner in (engine.runner, other):
        assert runner.chunks is not None
        graphs: Any = runner.chunks.graphs._graphs
        kinds.append(list(graphs))
    assert kinds[0] == kinds[1]
    assert {images for _, images in kinds[0]} == {False, True}


def test_drafts_change_no_bit(opened: OpenedModel) -> None:
    runner, (other,), _ = linked_runner(opened, 2, SMALL)
    plain = Engine(runner)
    request = replace(ONE, prompt=(*ONE.prompt[:11], *IDS[:5] * 12))
    expected = said(plain, request)
    plain.forget()
    drafting = new_drafts(runner, LoadOptions(speculate="ngram"), 4, "cpu")
    handle = Engine(runner, drafting=drafting).submit(request)
    assert [(list(handle), list(handle.log_probabilities))] == expected
    assert handle.speculation is not None
    assert other.shifts.any()


def test_the_other_rank_has_the_first_ones_bits(
    shared: tuple[Engine, Runner, ThreadCrew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings of another type are rounded before they are shared, and none is pickled."""
    engine, _, crew = shared
    share = GpuLink.share_embedded
    found: dict[bool, list[Tensor]] = {}
    sent: list[int] = []

    def noted(link: GpuLink, plan: StepPlan, like: Any) -> StepPlan:
        given = share(link, plan, like)
        found.setdefault(link.crew is None, []).extend(each.rows for each in given.embedded)
        sent.extend(each.rows.shape[1] for each in plan.embedded if link.crew is None)
        return given

    monkeypatch.setattr(GpuLink, "share_embedded", noted)
    image = ONE.images[0]
    rows = image.embeddings
    assert isinstance(rows, Tensor)
    exact = rows.double() / 3
    said(engine, replace(ONE, images=(replace(image, embeddings=exact),)))
    assert torch.equal(torch.cat(found[True]), exact.float())
    assert torch.equal(torch.cat(found[False]), exact.float())
    assert sent == [0]
    assert {"RunChunk", "SetShift", "RunStep"} <= set(crew.tasks)


def test_a_task_has_the_places_of_images_alone() -> None:
    plan = StepPlan(9, 1, 16, 9, embedded=(Embedded(2, torch.ones(4, H)),), axes=torch.ones(3, 9))
    sent = decoded(encoded(RunChunk(unembedded(plan), (1,) * 9, begins=True))).plan
    assert [(each.first, each.rows.shape) for each in sent.embedded] == [(2, (4, 0))]
    assert torch.equal(sent.axes, torch.ones(3, 9))


def test_positions_behind_a_step_that_failed(
    shared: tuple[Engine, Runner, ThreadCrew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank adds to the positions of a row what a sequence that has failed had there."""
    engine, other, _ = shared
    expected = said(engine, ONE, TEXT)
    engine.forget()
    handle = engine.submit(FOUR)
    next(handle)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.result()
    assert other.shifts[1] != 0
    assert said(engine, TEXT, ONE) == expected[::-1]
    assert torch.equal(other.shifts, engine.runner.shifts)

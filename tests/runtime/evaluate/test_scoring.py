"""Log-likelihoods and continuations against transformers in FP32, without any harness."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.evaluate import scoring
from lowbit.runtime.evaluate.scoring import Continuation, carry_on, read_continuation, score
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
CONTEXT = torch.randint(256, (30,), generator=torch.Generator().manual_seed(1)).tolist()
CHOICES = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
           for n in (1, 7, 2, 12)]  # fmt: skip
Make = Callable[..., "PackedModel"]
Say = Callable[[Sequence[int]], None]
Reference = Callable[["PackedModel"], Any]


def exact(packed: "PackedModel", context: int = 64) -> lowbit.Model:
    return lowbit.load(packed.folder, device="cpu", dtype=torch.float32, context=context)


def expected(hub: Any, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Sum of log-probabilities in FP64, and whether each token is the likeliest."""
    ids = torch.tensor([*context, *continuation])
    with torch.no_grad():
        logits = hub(ids[None, :-1]).logits[0, len(context) - 1 :].double()
    targets = ids[len(context) :]
    chosen = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())


def text_of(
    model: lowbit.Model, prompt: Sequence[int], wanted: Continuation, chat: bool = False
) -> tuple[str, bool]:
    """The text behind one prompt, and True if the prompt's beginning was left out."""
    [(number, text, cut)] = carry_on(model, [(prompt, wanted)], chat)
    assert number == 0
    return text, cut


@pytest.fixture(params=["dense", "hybrid"])
def packed(request: pytest.FixtureRequest) -> "PackedModel":
    name = "make_model" if request.param == "dense" else "make_qwen3_5"
    made: PackedModel = request.getfixturevalue(name)()
    return made


@in_commands("dense")
def test_choices_score_as_in_transformers(
    packed: "PackedModel", reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hub = exact(packed), reference(packed)
    for rows in (256, 5):  # a longer continuation is scored in parts
        monkeypatch.setattr(scoring, "ROWS", rows)
        for context in (CONTEXT, CONTEXT[:9], [*CONTEXT[:9], 4], CONTEXT):
            for choice in CHOICES:
                found = score(model, context, choice)
                likelihood, _ = expected(hub, context, choice)
                assert found.log_likelihood == pytest.approx(likelihood, abs=1e-3)
                assert not found.greedy
                assert not found.truncated


def test_the_likeliest_tokens_are_greedy_and_no_others(packed: "PackedModel") -> None:
    model = exact(packed)
    made: list[int] = []
    for _ in range(6):
        made.append(int(model.logits([*CONTEXT, *made])[-1].argmax()))
    assert score(model, CONTEXT, made).greedy
    for index in range(6):
        other = [*made[:index], (made[index] + 1) % 272, *made[index + 1 :]]
        assert not score(model, CONTEXT, other).greedy


def test_a_context_runs_once_for_all_choices(
    packed: "PackedModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact(packed)
    kind = type(model.engine.decoder)
    run, plain = [], kind.each_layer

    def counted(self: Any, ids: Tensor, state: Any, step: Any) -> Iterator[Tensor]:
        run.append(len(ids))
        return plain(self, ids, state, step)

    monkeypatch.setattr(kind, "each_layer", counted)
    totals = []
    for choice in CHOICES:
        run.clear()
        score(model, CONTEXT, choice)
        totals.append(sum(run))
    # The last token of a context is run with each choice, the last of a choice never.
    assert totals == [len(CONTEXT), *(len(choice) for choice in CHOICES[1:])]


def test_a_long_context_loses_its_beginning(packed: "PackedModel", reference: Reference) -> None:
    model, hub = exact(packed, context=20), reference(packed)
    for choice in CHOICES:
        found = score(model, CONTEXT, choice)
        kept = CONTEXT[-(20 + 1 - len(choice)) :]  # the last token of a choice needs no place
        assert found.truncated
        assert found.log_likelihood == pytest.approx(expected(hub, kept, choice)[0], abs=1e-3)
    whole = score(model, CONTEXT, CONTEXT[:20])
    likelihood, _ = expected(hub, CONTEXT[-1:], CONTEXT[:20])
    assert whole.log_likelihood == pytest.approx(likelihood, abs=1e-3)
    with pytest.raises(RequestError, match="the continuation has 21 tokens, the context is 20"):
        score(model, CONTEXT, CONTEXT[:21])


def test_what_cannot_be_scored_is_refused(make_model: Make) -> None:
    model = exact(make_model())
    for context, continuation in (([], [1]), ([1], [])):
        with pytest.raises(RequestError, match="has no tokens"):
            score(model, context, continuation)
    for context, continuation in (([1], [272]), ([1], [-1]), ([272], [1]), ([1], [272, 1])):
        with pytest.raises(RequestError, match="token ids must be between 0 and 271"):
            score(model, context, continuation)


def test_logits_begin_where_they_are_asked_for(packed: "PackedModel") -> None:
    model = exact(packed)
    whole = model.engine.logits(CONTEXT)
    for start in (29, 12, 0, 12):
        part = model.engine.logits(CONTEXT, start)
        assert part.shape == whole[start:].shape
        assert torch.allclose(part, whole[start:], atol=1e-4)
    for start in (-1, 30):
        with pytest.raises(RequestError, match=f"the sequence has 30 tokens, none is .* {start}"):
            model.engine.logits(CONTEXT, start)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Continuation((), 256, lowbit.SamplingParams(seed=3))),
        ({"until": "\n"}, Continuation(("\n",), 256, lowbit.SamplingParams(seed=3))),
        (
            {"until": ["Q:", "", "</s>"], "max_gen_toks": 9, "max_tokens": 5, "num_beams": 1},
            Continuation(("Q:", "</s>"), 9, lowbit.SamplingParams(seed=3)),
        ),
        (
            {"do_sample": False, "temperature": 0.7, "max_new_tokens": 5},
            Continuation((), 5, lowbit.SamplingParams(seed=3)),
        ),
        ({"temperature": 0.7}, Continuation((), 256, lowbit.SamplingParams(0.7, seed=3))),
        (
            {"do_sample": True, "top_p": 0.9, "top_k": 4},
            Continuation((), 256, lowbit.SamplingParams(1.0, 4, 0.9, seed=3)),
        ),
    ],
)
def test_generation_settings_are_read(settings: dict[str, Any], wanted: Continuation) -> None:
    assert read_continuation(settings, seed=3) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 10}, "`num_beams: 10` is not supported"),
        ({"penalty_alpha": 0.6}, "`penalty_alpha: 0.6` is not supported"),
        ({"until": [3]}, "stop strings"),
        ({"max_gen_toks": 0}, "0 new tokens"),
        ({"max_gen_toks": "many"}, "`max_gen_toks: 'many'` is not a number"),
        ({"temperature": True}, "`temperature: True` is not a number"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_continuation(settings, seed=0)


def test_a_text_goes_on_as_generate_says(make_model: Make) -> None:
    model = exact(make_model())
    prompt = model.tokenizer.encode("Once upon a time there")
    whole = model.generate("Once upon a time there", raw=True, sampling=GREEDY, max_new_tokens=20)
    wanted = Continuation((), 20, GREEDY)
    assert text_of(model, prompt, wanted) == (whole.text, False)
    stop = whole.text[4:6]
    text, _ = text_of(model, prompt, Continuation((stop,), 20, GREEDY))
    assert text == whole.text.split(stop)[0]


def test_a_long_prompt_leaves_room_for_its_continuation(make_model: Make) -> None:
    packed = make_model()
    wanted = Continuation((), 8, GREEDY)
    text, cut = text_of(exact(packed, 20), CONTEXT, wanted)
    assert cut
    assert (text, False) == text_of(exact(packed, 20), CONTEXT[-12:], wanted)
    with pytest.raises(RequestError, match="20 new tokens leave no room for a prompt"):
        text_of(exact(packed, 20), CONTEXT, Continuation((), 20, GREEDY))


def test_a_special_token_may_stop_a_text(make_model: Make, say: Say) -> None:
    model = exact(make_model())
    start = model.tokenizer.token_id("<|im_start|>")
    assert start is not None
    assert start not in model.stop_ids
    tokens = [65, 66, start, 67]
    say(tokens)
    stopped, _ = text_of(model, CONTEXT, Continuation(("<|im_start|>",), 4, GREEDY))
    say(tokens)
    passed, _ = text_of(model, CONTEXT, Continuation((), 4, GREEDY))
    assert passed == model.tokenizer.decode(tokens)
    assert stopped == model.tokenizer.decode(tokens[:2])
    assert len(stopped) < len(passed)


def test_reasoning_is_no_part_of_a_chat_answer(make_model: Make, say: Say) -> None:
    model = exact(make_model())
    encode = model.tokenizer.encode
    tokens = encode("<think>2 + 2</think>4")
    wanted = Continuation((), len(tokens), GREEDY)
    say(tokens)
    assert text_of(model, encode("?"), wanted, chat=True) == ("4", False)
    say(tokens)
    assert text_of(model, encode("?"), wanted) == ("<think>2 + 2</think>4", False)


@in_commands("dense")
def test_texts_are_made_together_and_are_those_of_one_at_a_time(
    packed: "PackedModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = exact(packed)
    together = lowbit.load(
        packed.folder, device="cpu", dtype=torch.float32, context=64, max_sequences=4
    )
    asked = [
        (CONTEXT[: 5 + 3 * n], Continuation((), 4 + 5 * (n % 3), replace(drawn, seed=n)))
        for n, drawn in enumerate((GREEDY, lowbit.SamplingParams(1.0)) * 4)
    ]
    asked.append((CONTEXT * 3, Continuation((), 9, GREEDY)))
    expected = [text_of(alone, *each) for each in asked]
    widths: list[int] = []
    kind = type(together.engine)
    step = kind.step

    def counted(engine: Any) -> bool:
        widths.append(len(engine.scheduler.running))
        return step(engine)

    monkeypatch.setattr(kind, "step", counted)
    made = list(carry_on(together, asked))
    assert sorted(number for number, _, _ in made) == list(range(9))
    assert [(text, cut) for _, text, cut in sorted(made)] == expected
    assert [cut for _, _, cut in sorted(made)] == [False] * 8 + [True]
    assert max(widths) == 4


def test_a_prompt_without_room_ends_the_others(make_model: Make) -> None:
    model = exact(make_model(), 20)
    asked = [(CONTEXT[:5], Continuation((), count, GREEDY)) for count in (8, 20)]
    with pytest.raises(RequestError, match="20 new tokens leave no room for a prompt"):
        list(carry_on(model, asked))
    assert text_of(model, *asked[0]) == text_of(exact(make_model(), 20), *asked[0])

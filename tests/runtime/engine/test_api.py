"""`lowbit.runtime` as a library: requests, streams, results, and what importing it costs."""

import shutil
from pathlib import Path

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, RequestError

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(temperature=1.2, top_k=50, seed=4)
START = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> lowbit.Model:
    return lowbit.load(BUNDLED, device="cpu")


@pytest.fixture(scope="module")
def story(model: lowbit.Model) -> lowbit.Generation:
    return model.generate(START, raw=True, sampling=GREEDY, max_new_tokens=60)


def test_a_trained_model_tells_a_story(model: lowbit.Model, story: lowbit.Generation) -> None:
    made = story
    assert made.finish_reason == "length"
    assert len(made.token_ids) == 60
    assert made.timings.prompt_tokens == len(made.prompt_token_ids) == 4
    assert made.text == model.tokenizer.decode(made.token_ids)
    assert sum(made.text.count(word) for word in ("she", "he", "the", "a", "was")) > 5


def test_streaming_gives_the_text_of_generate(model: lowbit.Model) -> None:
    for params in (GREEDY, HOT):
        whole = model.generate(START, sampling=params, max_new_tokens=20)
        stream = model.stream(START, sampling=params, max_new_tokens=20)
        pieces = list(stream)
        assert all(pieces)
        assert "".join(pieces) == whole.text
        assert stream.generation.token_ids == whole.token_ids


def test_the_reported_seed_repeats_a_text(model: lowbit.Model) -> None:
    first = model.generate(START, sampling=lowbit.SamplingParams(1.0), max_new_tokens=20)
    again = lowbit.SamplingParams(1.0, seed=first.seed)
    assert model.generate(START, sampling=again, max_new_tokens=20).token_ids == first.token_ids


def test_a_stop_token_ends_the_text(model: lowbit.Model) -> None:
    made = model.generate("Lily said goodbye and", raw=True, sampling=GREEDY)
    assert made.finish_reason == "stop"
    assert len(made.token_ids) > 10
    assert made.token_ids[-1] in model.stop_ids
    assert not any(id in model.stop_ids for id in made.token_ids[:-1])
    assert "<|" not in made.text


def test_a_stop_string_is_cut_and_ends_the_request(
    model: lowbit.Model, story: lowbit.Generation
) -> None:
    stop = story.text[50:62]
    made = model.generate(START, raw=True, sampling=GREEDY, max_new_tokens=60, stop=["@@", stop])
    assert made.finish_reason == "stop"
    assert made.text == story.text[: story.text.index(stop)]
    assert len(made.token_ids) < 60


def test_a_conversation_reuses_the_cache(model: lowbit.Model) -> None:
    messages: list[lowbit.Message] = [{"role": "user", "content": "Tell me a story."}]
    first = model.generate(messages, sampling=GREEDY, max_new_tokens=12)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": "And then?"})
    second = model.generate(messages, sampling=GREEDY, max_new_tokens=12)
    assert second.timings.reused_tokens > len(first.prompt_token_ids)
    fresh = lowbit.load(BUNDLED, device="cpu").generate(
        messages, sampling=GREEDY, max_new_tokens=12
    )
    assert fresh.timings.reused_tokens == 0
    assert fresh.prompt_token_ids == second.prompt_token_ids


def test_thinking_is_switched_by_the_template(model: lowbit.Model) -> None:
    on, off = model.encode("x", thinking=True), model.encode("x", thinking=False)
    assert model.encode("x") == on
    assert off == [*on, *model.tokenizer.encode("<think>\n\n</think>\n\n")]


def test_a_closed_stream_has_no_result(model: lowbit.Model) -> None:
    stream = model.stream(START, sampling=GREEDY, max_new_tokens=50)
    next(stream)
    stream.close()
    with pytest.raises(RequestError, match="the stream has not ended"):
        _ = stream.generation
    assert model.generate(START, sampling=GREEDY, max_new_tokens=5).token_ids


def test_requests_that_make_no_sense_are_refused(model: lowbit.Model) -> None:
    with pytest.raises(RequestError, match="`max_new_tokens` must be at least 1, got 0"):
        model.stream(START, max_new_tokens=0)
    with pytest.raises(RequestError, match="a stop string is empty"):
        model.stream(START, stop=[""])
    with pytest.raises(RequestError, match="a raw prompt must be text"):
        model.stream([{"role": "user", "content": "x"}], raw=True)
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.stream("", raw=True)
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens, the context is 2048"):
        model.stream(START * 1000)


def test_a_folder_without_a_tokenizer_is_refused_before_the_weights(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(BUNDLED / name, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        lowbit.load(tmp_path, device="cpu")


def test_a_folder_without_a_template_serves_raw_prompts(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(BUNDLED / name, tmp_path / name)
    model = lowbit.load(tmp_path, device="cpu")
    assert model.defaults == GREEDY  # no generation_config.json
    assert model.stop_ids == set(model.tokenizer.stop_ids())
    with pytest.raises(RequestError, match="has no chat template"):
        model.generate(START)
    assert model.generate(START, raw=True, max_new_tokens=5).text

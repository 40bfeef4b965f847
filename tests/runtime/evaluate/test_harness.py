"""The model under lm-evaluation-harness, against the harness's own transformers backend.

No test reaches for the network. All are skipped where the `evaluate` extra is not installed.
"""

import contextlib
import json
import logging
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.formats.tasks import TaskSettings, manifest_sha256, read_run, read_tasks
from lowbit.runtime.cli.main import main
from lowbit.runtime.evaluate.evaluate import evaluate

pytestmark = pytest.mark.clients
EXAMPLES = Path(__file__).parents[3] / "examples"
BUNDLED = EXAMPLES / "models" / "tiny-qwen3"
TASKS = EXAMPLES / "tasks"
LOCAL = ("--tasks", "stories_cloze", "--task-folder", str(TASKS), "--device", "cpu")
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside"
WINDOW = 48


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("evaluate", *arguments))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harness, cut off from the network, with a cache of its own; its warnings are its own."""
    pytest.importorskip("lm_eval")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        import datasets.config

        def cut(*_: Any, **__: Any) -> NoReturn:
            raise AssertionError("a local task reached for the network")

        # Its handlers write to the stderr of the test that imported it first.
        monkeypatch.setattr(logging, "raiseExceptions", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, cut)
        monkeypatch.setattr(socket, "getaddrinfo", cut)
        yield


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lowbit.convert import Recipe
    from tests.conversions import convert

    out = tmp_path_factory.mktemp("packed") / "tiny-qwen3-int4"
    convert(BUNDLED, out, Recipe("int4"))
    return out


@pytest.fixture(scope="module")
def in_transformers(packed: Path) -> tuple[Any, Any]:
    """The dequantized weights in FP32, and their tokenizer."""
    import transformers

    hub = transformers.AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    return hub, transformers.AutoTokenizer.from_pretrained(packed)


@pytest.fixture
def theirs(harness: None, in_transformers: tuple[Any, Any]) -> Callable[..., Any]:
    """The harness's transformers backend."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    hub, tokenizer = in_transformers
    return lambda **options: HFLM(hub, tokenizer=tokenizer, batch_size=1, **options)


def exact(folder: Path, context: int | None = None) -> lowbit.Model:
    return lowbit.load(folder, device="cpu", dtype=torch.float32, context=context)


def language_model(model: lowbit.Model, **options: Any) -> Any:
    from lowbit.runtime.evaluate.harness import LanguageModel

    return LanguageModel(model, **options)


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments=given, idx=0) for given in arguments]


def test_log_likelihoods_are_those_of_transformers(
    theirs: Callable[..., Any], packed: Path
) -> None:
    asked = requests(
        "loglikelihood",
        [
            (STORY, " with her friends."),
            (STORY, " in the park and a"),
            (f"{STORY} ", "with her friends."),
            ("", STORY),
            (f"{STORY}. " * 4, " One day"),  # longer than the window
            ("Once upon a", " time"),
            ("<|endoftext|>Once", " upon a time"),
        ],
    )
    ours, hub = language_model(exact(packed, WINDOW)), theirs(max_length=WINDOW)
    found, expected = ours.loglikelihood(asked), hub.loglikelihood(asked, disable_tqdm=True)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    assert ours.truncated == 1


def test_rolling_log_likelihoods_are_those_of_transformers(
    theirs: Callable[..., Any], packed: Path
) -> None:
    story = (EXAMPLES / "data" / "stories-eval.txt").read_text()[:900]
    asked = requests("loglikelihood_rolling", [(story,), (STORY,), ("A",)])
    ours, hub = language_model(exact(packed, WINDOW)), theirs(max_length=WINDOW)
    expected = hub.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(expected, abs=1e-3)


def test_greedy_texts_are_those_of_transformers(theirs: Callable[..., Any], packed: Path) -> None:
    settings = {"until": ["\n", "She"], "max_gen_toks": 24, "do_sample": False}
    asked = requests(
        "generate_until",
        [
            (STORY, settings),
            (STORY, settings | {"until": ["a"]}),
            ("Tom was", settings | {"until": []}),
            (STORY * 4, settings),  # longer than the window
        ],
    )
    ours, hub = language_model(exact(packed, WINDOW)), theirs(max_length=WINDOW)
    found = ours.generate_until(asked)
    assert found == hub.generate_until(asked, disable_tqdm=True)
    assert all(found)
    assert ours.truncated == 1


def test_sampled_texts_have_the_seed_of_their_place(harness: None, packed: Path) -> None:
    """However many are made beside them, and in whatever order they end."""
    settings = [{"do_sample": True, "max_gen_toks": 4 + 9 * (n % 3)} for n in range(7)]
    answered: list[tuple[int, int]] = []
    ours = language_model(
        exact(packed), progress=lambda done, total: answered.append((done, total))
    )
    found = ours.generate_until(requests("generate_until", [("Tom saw", own) for own in settings]))
    model = exact(packed)
    for seed, (text, own) in enumerate(zip(found, settings, strict=True), start=1):
        drawn = lowbit.SamplingParams(1.0, seed=seed)
        alone = model.generate(
            "Tom saw", raw=True, sampling=drawn, max_new_tokens=own["max_gen_toks"]
        )
        assert text == alone.text
    assert len({*found}) == 7
    assert answered == [(done, 7) for done in range(1, 8)]


def test_the_local_task_scores_as_with_transformers(
    theirs: Callable[..., Any], packed: Path
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    answered: list[tuple[int, int]] = []
    found = evaluate(
        exact(packed),
        TaskSettings(("stories_cloze",), TASKS, limit=12),
        progress=lambda done, total: answered.append((done, total)),
    )
    with contextlib.chdir(TASKS):
        manager = TaskManager(include_path=".", include_defaults=False)
        loaded = manager.load(["stories_cloze"])
    expected = lm_eval.evaluate(lm=theirs(), task_dict=loaded, limit=12)["results"]
    rows = {row.metric: row for row in found.report.tasks}
    assert rows.keys() == {"acc", "acc_norm"}
    for metric, row in rows.items():
        assert row.value == expected["stories_cloze"][f"{metric},none"]
        assert row.stderr == expected["stories_cloze"][f"{metric}_stderr,none"]
        assert (row.samples, row.limit, row.few_shot) == (12, 12, 0)
        assert row.kv_cache == "fp32"
    assert answered == [(done, 48) for done in range(1, 49)]
    assert rows["acc"].value is not None
    assert rows["acc"].value > 0.5  # chance is 0.25


def test_results_are_kept_beside_the_packed_file(harness: None, packed: Path) -> None:
    first = run(str(packed), *LOCAL, "--limit", "2", "--json")
    assert first.exit_code == 0, first.stderr
    assert first.stdout.count("\n") == 1
    printed = json.loads(first.stdout)
    kept = read_tasks(packed)
    assert kept is not None
    assert kept.manifest_sha256 == manifest_sha256(packed)
    assert printed.pop("seconds") > 0
    assert printed.pop("truncated") == 0
    assert printed == json.loads(kept.to_bytes())
    again = run(str(packed), *LOCAL, "--limit", "3", "--chat", "--no-think", "--context", "200")
    assert again.exit_code == 0, again.stderr
    assert "stories_cloze" in again.stdout
    assert f"{packed / 'tasks.json'}" in again.stderr.replace("\n", "")
    replaced = read_tasks(packed)
    assert replaced is not None
    assert {(row.limit, row.chat, row.context) for row in replaced.tasks} == {(3, True, 200)}


def test_a_file_of_scores_leaves_the_folder_as_it_is(
    harness: None, packed: Path, tmp_path: Path
) -> None:
    before = read_tasks(packed)
    done = run(str(packed), *LOCAL, "--limit", "5", "--out", str(tmp_path / "run.json"))
    assert done.exit_code == 0, done.stderr
    assert read_tasks(packed) == before
    written = read_run(tmp_path / "run.json")
    rows = {row.metric: row for row in written.report.tasks}
    assert [own.metric for own in written.scores] == list(rows) == ["acc", "acc_norm"]
    for own in written.scores:
        assert len(set(own.documents)) == 5
        assert own.counts == (1,) * 5
        assert sum(own.totals) / 5 == rows[own.metric].value


def test_the_original_gets_no_file(harness: None) -> None:
    done = run(str(BUNDLED), *LOCAL, "--limit", "1")
    assert done.exit_code == 0, done.stderr
    assert "not kept" in done.stderr
    assert not (BUNDLED / "tasks.json").exists()


def test_broken_tasks_are_one_message(harness: None, tmp_path: Path) -> None:
    def describe(name: str, **config: str) -> None:
        lines = {"task": name, "dataset_path": "json", "output_type": "multiple_choice", **config}
        text = "".join(f"{key}: {value}\n" for key, value in lines.items())
        (tmp_path / f"{name}.yaml").write_text(text)

    (tmp_path / "bad.jsonl").write_text('{"question": \n')
    describe("lost", dataset_kwargs="{data_files: {test: nowhere.jsonl}}", test_split="test")
    describe("garbled", dataset_kwargs="{data_files: {test: bad.jsonl}}", test_split="test")
    describe("unsafe", dataset_kwargs="{data_files: {test: good.jsonl}}", unsafe_code="true",
             test_split="test", doc_to_text="q", doc_to_choice="c", doc_to_target="a")  # fmt: skip
    describe("lacking", dataset_kwargs="{data_files: {test: good.jsonl}}", test_split="test",
             process_results="!function lacking.score")  # fmt: skip
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    (tmp_path / "good.jsonl").write_text('{"q": "?", "c": ["x", "y"], "a": 0}\n')
    options = ("--task-folder", str(tmp_path), "--device", "cpu")
    for name, message in (
        ("lost", "nowhere.jsonl"),
        ("garbled", "`garbled` cannot be loaded"),
        ("unsafe", "`unsafe` runs what the model writes"),
        ("lacking", "`lacking` cannot be loaded: `no_such_package` is not installed"),
    ):
        failed = run(str(BUNDLED), "--tasks", name, *options)
        assert failed.exit_code == 1, name
        assert message in failed.stderr, name
        assert "Traceback" not in failed.stderr, name


@pytest.mark.slow
def test_an_unknown_task_is_one_message(harness: None) -> None:
    failed = run(str(BUNDLED), *LOCAL[2:], "--tasks", "storys_cloze")
    assert failed.exit_code == 1
    assert "there is no task `storys_cloze`" in failed.stderr
    assert "stories_cloze" in failed.stderr.partition("hint: did you mean ")[2]


def test_chat_needs_a_template(harness: None, make_model: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="has no chat template"):
        evaluate(exact(make_model().folder), TaskSettings(("stories_cloze",), TASKS, chat=True))


def test_a_chat_may_begin_its_answer(harness: None) -> None:
    ours = language_model(exact(BUNDLED), chat=True, thinking=False)
    asked = [{"role": "user", "content": "Hi"}]
    prompt = ours.apply_chat_template(asked)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    begun = [*asked, {"role": "assistant", "content": "The answer is"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == prompt + "The answer is"


def test_a_text_without_context_needs_a_token_before_it(
    harness: None, make_model: Callable[..., Any]
) -> None:
    ours = language_model(exact(make_model().folder))
    with pytest.raises(RequestError, match="tokenizer_config"):
        ours.loglikelihood(requests("loglikelihood", [("", "text")]))

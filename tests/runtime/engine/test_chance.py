"""The line on drafts that are right as rarely as by chance: when, what, once, and where."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner, Result

from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.chance import ChanceWatch
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.stats import CHANCE, PAYING, OfSource, Source, Tally
from lowbit.runtime.serve.logs import Line
from tests.drafters import write_drafter
from tests.runtime.serve.conftest import NAME, running
from tests.short_models import Shorten

ANSWER = ("--temperature", "0", "--device", "cpu", "--max-new-tokens", "200")
LIKE_CHANCE = "is right as rarely as by chance, "
Run = Callable[..., Result]


def drafts(source: Source, wrong: int, right: int, size: int = 1) -> Tally:
    """Rounds of `size` drafts of which the first is wrong, or all are right."""
    tally = Tally()
    for accepted, times in ((0, wrong), (size, right)):
        for _ in range(times):
            tally.count(size, accepted, source)
    return tally


def test_the_bound_spares_drafts_that_may_pay() -> None:
    """Those that are right once in four ever reach it with a probability below 1e-4."""
    reached, paths = 0.0, {0: 1.0}  # probability of each number of right drafts, not doubted yet
    for compared in range(1, 400):
        grown: dict[int, float] = {}
        for right, chance in paths.items():
            for accepted, share in ((right, 1 - PAYING), (right + 1, PAYING)):
                grown[accepted] = grown.get(accepted, 0.0) + chance * share
        doubted = {n for n in grown if OfSource(0, 0, compared, n).like_chance}
        reached += sum(grown.pop(n) for n in doubted)
        paths = grown
    assert 1e-6 < reached < 1e-4


@pytest.mark.parametrize(
    ("wrong", "right", "doubted"),
    [(41, 0, False), (42, 0, True), (178, 22, True), (177, 23, False), (0, 0, False)],
)
@pytest.mark.parametrize("source", ["head", "drafter"])
def test_few_or_better_drafts_are_not_doubted(
    source: Source, wrong: int, right: int, doubted: bool
) -> None:
    found = drafts(source, wrong, right).speculated
    assert found.like_chance == ((source,) if doubted else ())


def test_drafts_behind_wrong_ones_say_nothing() -> None:
    """15 drafts a round, of which the first is right in a third of the rounds."""
    tally = Tally()
    for number in range(300):
        tally.count(15, int(number % 3 == 0), "drafter")
    assert sum(tally.accepted) < CHANCE * sum(tally.drafted)
    assert tally.speculated.like_chance == ()


def test_copies_are_not_doubted() -> None:
    tally = drafts("copied", 1000, 0)
    assert tally.speculated.like_chance == ()
    tally.add(drafts("forced", 1000, 0))
    assert ChanceWatch(LoadOptions()).count(tally.speculated) is None


def test_the_line_comes_once_and_counts_all_answers() -> None:
    watch = ChanceWatch(LoadOptions(speculate="auto", drafter="other-dflash"))
    each = drafts("drafter", 25, 1).speculated
    assert [watch.count(None), watch.count(each), watch.count(each)] == [None] * 3
    line = watch.count(each)
    assert line is not None
    assert line.startswith(f"the drafter `other-dflash` {LIKE_CHANCE}3 of 78 drafts: ")
    assert "another model, or trained without thinking; --speculate off or ngram" in line
    assert watch.count(each) is None


def test_copies_that_are_right_hide_no_drafter() -> None:
    tally = drafts("copied", 0, 1000, 8)
    tally.add(drafts("head", 200, 3))
    line = ChanceWatch(LoadOptions(speculate="auto")).count(tally.speculated)
    assert line is not None
    assert line.startswith(f"the model's head for multi-token prediction {LIKE_CHANCE}3 of 203 ")


@pytest.fixture(scope="module")
def target(shorten: Shorten) -> str:
    return str(shorten("tiny-qwen3.5"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drafter of random weights, in a folder whose name drives a terminal.

    Of an answer few drafts are checked, since they do not pay, so less must be enough here.
    """
    monkeypatch.setattr("lowbit.runtime.engine.stats.EVIDENCE", 1.0)
    section = {"mask_token_id": 1000, "target_layer_ids": [0]}
    write_drafter(tmp_path / "own\x1b[31m", dflash_config=section, num_target_layers=2)
    return tmp_path / "own\x1b[31m"


@pytest.fixture
def run(folder: Path) -> Run:
    options = ("--speculate", "dflash", "--drafter", str(folder))
    return lambda *given, stdin=None: CliRunner().invoke(main, [*given, *options], input=stdin)


def check(done: Result) -> None:
    assert done.exit_code == 0, done.output
    assert done.stderr.count(LIKE_CHANCE) == 1
    assert "own\\x1b[31m`" in done.stderr
    assert "\x1b" not in done.stderr
    assert LIKE_CHANCE not in done.stdout


@pytest.mark.commands
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_answer_names_a_wrong_drafter(target: str, run: Run, options: tuple[str, ...]) -> None:
    done = run(target, "Once upon a time", "--raw", *ANSWER, *options)
    check(done)
    if options:
        assert json.loads(done.stdout)["speculation"]["like_chance"] == ["drafter"]


@pytest.mark.commands
def test_a_chat_names_it_once(target: str, run: Run) -> None:
    check(run("chat", target, *ANSWER, stdin="Tell a story.\n" * 3))


@pytest.mark.commands
def test_a_file_of_prompts_names_it_once(target: str, run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    lines = [{"id": n, "prompt": f"{n} birds", "raw": True} for n in range(3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    check(run(target, "--prompts", str(prompts), *ANSWER))


def test_a_server_logs_it_once(target: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(target, device="cpu", context=256, speculate="dflash", drafter=folder)
    body = {"model": NAME, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
    with running(model) as server:
        for _ in range(3):
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert LIKE_CHANCE not in answer.text
    [line] = [each for each in caplog.records if LIKE_CHANCE in each.message]
    assert line.levelname == "WARNING"
    assert "own\\x1b[31m`" in Line().format(line)

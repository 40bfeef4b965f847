"""Prompts for a model: the same for a seed, all kinds in equal shares, none from judged texts."""

from collections import Counter
from pathlib import Path

import pytest

from lowbit.convert.texts.evaluation import default_texts
from lowbit.convert.texts.prompts import prompts

EVERYDAY = Path(__file__).parents[3] / "convert" / "texts" / "data" / "everyday-prompts.txt"


def kind(prompt: str) -> str:
    if prompt in EVERYDAY.read_text(encoding="utf-8").splitlines():
        return "everyday"
    first = prompt.partition(":\n\n")[0]
    code = first in ("Explain this code and improve it", "Write tests for this code")
    passage = first in ("Continue this text", "Summarize this text", "Explain this text to a child")
    return "code" if code else "passage" if passage else "question"


@pytest.mark.parametrize("count", [1, 7, 240, 500])
def test_kinds_have_equal_shares(count: int) -> None:
    found = prompts(count, 0)
    assert len(found) == count
    shares = Counter(map(kind, found))
    assert max(shares.values()) - min(shares.get(k, 0) for k in shares) <= 1
    assert len(shares) == min(count, 4)
    assert count > 240 or len(set(found)) == count


def test_the_seed_decides() -> None:
    assert prompts(20, 3) == prompts(20, 3)
    assert prompts(20, 3) != prompts(20, 4)


def test_kinds_are_mixed_and_tasks_vary() -> None:
    found = prompts(240, 0)
    for half in (found[::2], found[1::2]):  # every second prompt may be asked with thinking
        assert min(Counter(map(kind, half)).values()) > 15
    tasks = Counter(text.partition(":\n\n")[0] for text in found if kind(text) != "question")
    assert sum(count > 10 for count in tasks.values()) == 5


def test_questions_come_without_answers_and_nothing_is_judged() -> None:
    judged = "\n".join(text.content for text in default_texts())
    for prompt in prompts(240, 0):
        if kind(prompt) == "question":
            assert "####" not in prompt
            assert "\n" not in prompt
            assert prompt.endswith(("?", "."))
        assert prompt.rpartition("\n\n")[2] not in judged

"""Make stories_cloze.jsonl: which of four sentences continues the story?

python examples/maintenance/make_stories_cloze.py

A question is the beginning of a story of examples/data/stories-eval.txt, about 60 words up to the
end of a sentence. The right answer is the story's next sentence; the three wrong ones stand at the
same place in other stories, have about as many words, and name nobody whom the question does not
name.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[1]
TEXT = EXAMPLES / "data" / "stories-eval.txt"
TASK = EXAMPLES / "tasks" / "stories_cloze.jsonl"
QUESTIONS = 100
CONTEXT_WORDS = 60
ANSWER_WORDS = range(8, 21)
LENGTHS = 3  # words by which answers to one question may differ from the right one
SEED = 5
SENTENCE = re.compile(r'[^.!?]+[.!?]+["”]?\s*')
NAME = re.compile(r"\bnamed ([A-Z][a-z]+)")


@dataclass(frozen=True, slots=True)
class Story:
    """The beginning of a story and the sentence after it."""

    question: str
    answer: str


def split(text: str) -> Story | None:
    """A story cut behind a sentence; None if it is too short or the next sentence unsuitable."""
    sentences = [" ".join(match.split()) for match in SENTENCE.findall(text)]
    for index in range(1, len(sentences)):
        question = " ".join(sentences[:index])
        if len(question.split()) >= CONTEXT_WORDS:
            answer = sentences[index]
            plain = '"' not in answer and answer[0].isupper()
            fits = question.count('"') % 2 == 0 and len(answer.split()) in ANSWER_WORDS
            return Story(question, answer) if plain and fits else None
    return None


def ask(text: str) -> list[str]:
    """The questions as lines of JSON."""
    names = set(NAME.findall(text))
    cut = [split(story) for story in text.split("\n\n")]
    pool = list({story.answer: story for story in cut if story is not None}.values())
    words = {story.answer: re.findall(r"\w+", story.answer) for story in pool}
    draw = random.Random(SEED)
    lines: list[str] = []
    for story in pool:
        strangers = names - set(re.findall(r"\w+", story.question))
        near = [
            answer
            for answer, found in words.items()
            if answer != story.answer
            and abs(len(found) - len(words[story.answer])) <= LENGTHS
            and strangers.isdisjoint(found)
        ]
        if len(near) < 3 or len(lines) == QUESTIONS:
            continue
        choices = [story.answer, *draw.sample(near, 3)]
        draw.shuffle(choices)
        line = {"question": story.question, "choices": choices}
        lines.append(json.dumps({**line, "answer": choices.index(story.answer)}))
    return lines


def main() -> None:
    lines = ask(TEXT.read_text(encoding="utf-8"))
    TASK.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()

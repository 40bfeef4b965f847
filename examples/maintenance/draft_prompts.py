"""Prompts about code and prose to train a drafter on, and others that measure it.

python examples/maintenance/draft_prompts.py prompts --code /usr/lib/python3 --prose wiki.txt \\
    --questions gsm8k.jsonl

Code is functions of Python files, prose is paragraphs of a text whose headings are ` = Title = ` as
WikiText's are, and questions are lines with `question`. Files and articles are told apart by a hash
of their name or title: of one in sixteen the prompts are held out. Lines are those of `lowbit-run
generate --prompts`.
"""

import ast
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

HELD_OUT = 16  # one of so many files and articles is held out
SHORTEST, LONGEST = 120, 1100  # characters of a function or a paragraph
CODE = (
    "Explain what this function does.\n\n```python\n{}\n```",
    "Write unit tests with pytest for this function.\n\n```python\n{}\n```",
    "Translate this Python function to C.\n\n```python\n{}\n```",
    "Translate this Python function to JavaScript.\n\n```python\n{}\n```",
    "Translate this code to Go.\n\n```python\n{}\n```",
    "Translate this code to Rust.\n\n{}",
    "Add type hints and a docstring. Answer with the code alone.\n\n```python\n{}\n```",
    "Rewrite this function so that it is easier to read.\n\n```python\n{}\n```",
    "Are there bugs in this code? Show a corrected version.\n\n{}",
    "Rewrite this as a class with methods, and show how to use it:\n\n{}",
    "Add error handling and logging to this function:\n\n```python\n{}\n```",
    "Review this code and name three improvements with examples.\n\n```python\n{}\n```",
)
BEGUN = (
    "Complete this Python function.\n\n```python\n{}\n```",
    "Write the body of this function. Answer with code only.\n\n{}",
)
WANTED = (
    "Write a Python function that does the following: {}",
    "Write a short program in {language} for this task, and explain it: {}",
    "How do I do this in {language}? {}",
)
LANGUAGES = ("Python", "JavaScript", "C++", "Java", "Go", "Rust", "C", "SQL and Python", "Bash")
PROSE = (
    "Summarize this text in three sentences.\n\n{}",
    "Write five questions about this text, and answer them.\n\n{}",
    "Continue this text with two more paragraphs.\n\n{}",
    "Explain this text to a child of ten years.\n\n{}",
    "List the most important facts of this text.\n\n{}",
    "Rewrite this text in a more formal style.\n\n{}",
    "Rewrite this text as a letter to a friend:\n\n{}",
    "Translate this text to German:\n\n{}",
    "Translate this text to Spanish:\n\n{}",
    "What is this text about? Who is named in it, and why?\n\n{}",
)
TOPICS = (
    "Write a short essay about {}.",
    "Write a short story in which {} plays a part.",
    "Tell me about {}.",
    "Write an e-mail in which you recommend a documentary about {}.",
    "What should a beginner know about {}? Give an overview.",
    "Write a dialogue between a teacher and a student about {}.",
    "Write a blog post about {} with a title and three sections.",
)
MATHS = ("{}", "{} Think step by step.", "Solve this problem and explain each step.\n\n{}")


def held_out(name: str) -> bool:
    """True for one name in HELD_OUT, whatever machine asks."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0


def functions(path: Path) -> Iterator[tuple[str, str | None, str | None]]:
    """Source, what comes before the body (if a docstring is there), and docstring of functions."""
    try:
        source = path.read_text("utf-8")
        parsed = ast.parse(source)
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    lines = source.split("\n")  # as `ast` counts them: a form feed ends none
    for node in ast.walk(parsed):
        if not isinstance(node, ast.FunctionDef):
            continue
        own = lines[node.lineno - 1 : node.end_lineno]
        text = "\n".join(line.removeprefix(" " * node.col_offset) for line in own)
        said = ast.get_docstring(node)
        begun = None
        if said and len(node.body) > 1:
            begun = "\n".join(text.split("\n")[: (node.body[0].end_lineno or 0) - node.lineno + 1])
        if SHORTEST <= len(text) <= LONGEST:
            yield text, begun, said
        elif begun and len(begun) <= LONGEST:
            yield "", begun, said


def code_prompts(path: Path, draw: random.Random, most: int) -> list[str]:
    """Prompts about some functions of a file."""
    found = []
    for text, begun, said in functions(path):
        kinds = [*CODE] if text else []
        if begun:
            kinds += BEGUN * 2
        if said and len(said.split("\n\n")[0]) > 30:
            kinds += WANTED
        kind = draw.choice(kinds) if kinds else None
        if kind in WANTED and said:
            task = " ".join(said.split("\n\n")[0].split())
            found.append(kind.format(task, language=draw.choice(LANGUAGES)))
        elif kind is not None:
            found.append(kind.format(begun if kind in BEGUN else text))
    return draw.sample(found, min(most, len(found)))


def articles(text: str) -> Iterator[tuple[str, list[str]]]:
    """Title and paragraphs of each article."""
    parts = re.split(r"^ = ([^=\n]+) = $", text, flags=re.MULTILINE)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        clean = re.sub(r" @([-.,])@ ", r"\1", body)
        clean = re.sub(r" ([.,;:)'!?])", r"\1", clean)
        paragraphs = [line.strip() for line in clean.split("\n") if not line.startswith(" =")]
        yield title, [p[:LONGEST] for p in paragraphs if len(p) >= SHORTEST]


def prose_prompts(title: str, paragraphs: Sequence[str], draw: random.Random) -> list[str]:
    """Prompts about an article: several of each paragraph, and all topics."""
    asked = [kind.format(each) for each in paragraphs for kind in draw.sample(PROSE, 4)]
    return asked + [kind.format(title) for kind in TOPICS]


def values_of(path: Path, key: str) -> list[str]:
    """The value of a key in the object on each line of a JSONL file."""
    lines = path.read_text("utf-8").split("\n")  # other line ends may stand inside JSON strings
    return [json.loads(line)[key] for line in lines if line.strip()]


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--code", "roots", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--prose", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--questions", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--count", default=24_000, show_default=True, help="Most prompts to train on.")
@click.option("--measured", default=64, show_default=True, help="Prompts of each held-out kind.")
@click.option("--each", default=6, show_default=True, help="Most functions of a file.")
def main(
    out: Path,
    roots: tuple[Path, ...],
    prose: tuple[Path, ...],
    questions: tuple[Path, ...],
    count: int,
    measured: int,
    each: int,
) -> None:
    """Write train.jsonl, and code.jsonl and prose.jsonl of what is held out, into OUT."""
    draw = random.Random(0)
    code: dict[bool, list[str]] = {True: [], False: []}
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    draw.shuffle(files)
    for path in files:
        if len(code[False]) >= count and len(code[True]) >= measured:
            break
        code[held_out(path.name)] += code_prompts(path, draw, each)
    told: dict[bool, list[str]] = {True: [], False: []}
    for path in prose:
        for title, paragraphs in articles(path.read_text("utf-8")):
            told[held_out(title)] += prose_prompts(title, paragraphs, draw)
    for path in questions:
        for question in values_of(path, "question"):
            told[held_out(question)].append(draw.choice(MATHS).format(question))
    for prompts in (*code.values(), *told.values()):
        draw.shuffle(prompts)
    beside = max(count // 2, count - len(told[False]))
    trained = [*code[False][:beside], *told[False][: count - min(beside, len(code[False]))]]
    draw.shuffle(trained)
    out.mkdir(parents=True, exist_ok=True)
    parts = {"train": trained, "code": code[True][:measured], "prose": told[True][:measured]}
    for name, prompts in parts.items():
        lines = (json.dumps({"id": f"{name}-{n}", "prompt": p}) for n, p in enumerate(prompts))
        (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        click.echo(f"{name}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()

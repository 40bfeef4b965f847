"""Hostile tokenizers, templates and prompts through the commands: one sentence, exit code 1."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.formats.text import tokenizer
from lowbit.formats.text.template import MAX_PROMPT_BYTES
from lowbit.runtime.cli import generate
from lowbit.runtime.cli.main import main
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

Make = Callable[..., "PackedModel"]
PADDING = {
    "strategy": {"Fixed": 2**31},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"


def change(folder: Path, **parts: Any) -> None:
    """Replace parts of tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def run(folder: Path, *arguments: str, text: str | bytes = "aaaa") -> Result:
    limits = ["--device", "cpu", "--max-new-tokens", "2"]
    return CliRunner().invoke(main, ["generate", str(folder), *limits, *arguments], input=text)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "takes more than 512 MiB of memory"),
        ("{% for i in range(99999) %}" + EACH + "{% endfor %}", "writes over"),
        ("{{ messages.a.b }}", "refuses the messages"),
        ("{{ raise_exception('\x1b[2J') }}", r"refuses the messages: \x1b[2J"),
        ("{% if", "is not valid jinja2"),
    ],
)
def test_a_hostile_template_ends_with_a_sentence(
    source: str, reason: str, make_model: Make
) -> None:
    folder = make_model().folder
    (folder / "chat_template.jinja").write_text(source)
    result = run(folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: the chat template ")
    assert reason in result.stderr


@in_commands("parts0-*")
@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        # On a busy machine its time is over first.
        (
            {"normalizer": {"type": "Sequence", "normalizers": [GROW] * 12}},
            r"memory, or crashes|takes longer than",
        ),
        ({"pre_tokenizer": {"type": "Split"}}, "is not a tokenizer"),
        ({"model": None}, "it has no vocabulary"),
        ({"added_tokens": [{"id": 2**40, "content": "a"}]}, "has the token id 1099511627776"),
    ],
)
def test_a_hostile_tokenizer_ends_with_a_sentence(
    parts: dict[str, Any], reason: str, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "WORKER_BYTES", tokenizer.WORKER_BYTES // 2)
    folder = make_model().folder
    change(folder, **parts)
    result = run(folder, "--raw")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(reason, result.stderr)
    assert "tokenizer.json" in result.stderr


def test_truncation_and_padding_change_no_prompt(make_model: Make) -> None:
    model = make_model()
    (model.folder / "chat_template.jinja").write_text(EACH)
    prompts = []
    for parts in ({}, {"truncation": TRUNCATION}, {"padding": PADDING}):
        change(model.folder, **parts)
        printed = json.loads(run(model.folder, "--json", text="once upon a time").stdout)
        prompts.append(printed["prompt_token_ids"])
    assert len(prompts[0]) == 16
    assert prompts == prompts[:1] * 3


def test_a_generation_block_is_rendered(make_model: Make) -> None:
    folder = make_model().folder
    source = (
        "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(source)
    model = lowbit.load(folder, device="cpu", dtype=torch.float32)
    assert model.tokenizer.decode(model.encode("a b")) == "<a b>"


def test_ids_without_an_embedding_name_the_tokenizer(make_model: Make) -> None:
    folder = make_model().folder
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["z"] = 5000
    change(folder, model=content["model"] | {"vocab": vocab})
    model = lowbit.load(folder, device="cpu", dtype=torch.float32)
    assert model.encode("a", raw=True) == [vocab["a"]]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json` gives token 5000"):
        model.encode("z", raw=True)


@pytest.mark.parametrize("raw", [True, False])
def test_a_long_prompt_is_refused_before_it_is_tokenized(
    raw: bool, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model().folder
    (folder / "chat_template.jinja").write_text(EACH)
    model = lowbit.load(folder, device="cpu", dtype=torch.float32, context=64)
    text = "a" * model.tokenizer.max_bytes(64)

    def never(*arguments: object) -> None:
        raise AssertionError("tokenized")

    with pytest.raises(RequestError, match=r"holds at most") as caught:
        model.encode(text * 10, raw=raw)
    assert caught.value.hint == "shorten the prompt, or ask for a larger --context"
    monkeypatch.setattr(type(model.tokenizer.text), "encode", never)
    with pytest.raises(RequestError, match="the context holds at most"):
        model.encode(text + "a", raw=raw)


def test_stdin_is_read_as_far_as_a_prompt_can_be_long(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_BYTES", 100)
    assert MAX_PROMPT_BYTES > 100
    folder = make_model().folder
    assert run(folder, "--raw", text="a" * 100).exit_code == 0
    result = run(folder, "--raw", text="a" * 10_000)
    assert result.exit_code == 1
    assert "the prompt has 101 bytes or more, the context holds at most 100" in result.stderr
    assert run(folder, "--raw", text=b"\xff").exit_code == 1

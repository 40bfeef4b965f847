"""The text that methods calibrate on, as windows of tokens spread over all of it.

A plain text is one document; a line of a .jsonl file is one, either `text` or `messages`. The
tokens of all documents stand one after the other, without special tokens between them.
"""

import hashlib
import json
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.architectures import read_config
from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.files.user_file import read_text_file, read_user_file
from lowbit.formats.printable import printable
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, read_json
from lowbit.formats.text.template import load_chat_template
from lowbit.formats.text.tokenizer import load_text_tokenizer

BUNDLED_NAME = "bundled mix of prose, dialogue, mathematics and code"
CODE_FILE = "python-stdlib-calibration-60kB.txt"
BUNDLED_FILES = ("simplewiki.txt", "shakespeare.txt", "gsm8k-train-sample.txt", CODE_FILE)
WHAT = "calibration text"
LEAST_TOKENS = 32  # of a text; fewer are a slip, not a text
PARAGRAPH_END = re.compile(r"\n\s*\n")

Turn = dict[str, Any]  # role and content are text; what else there is goes to the template
Document = str | list[Turn]
Render = Callable[[list[Turn]], str]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of text that a model is calibrated on."""

    name: str  # shown in the report
    sha256: str  # of the file as UTF-8 with LF line ends; of all bundled files, one after the other
    samples: Tensor  # [samples, T] int64 token ids
    tokens: int  # of the whole text; samples may be fewer
    chat: bool  # whether the original's chat template was applied


def read_calibration(
    path: Path | None, folder: Path, *, length: int, limit: int, chat: bool = False
) -> CalibrationText:
    """Windows of a text, of the bundled one where no file is named.

    Without `chat` the turns of `messages` become paragraphs of a plain text. With it they are
    rendered by the chat template, and so are the paragraphs of plain texts, two by two: what a
    user says and what the assistant answers.

    Args:
        path: a `.txt` file, or a `.jsonl` file with an object of `text` or `messages` a line.
        length: tokens of a window; fewer where the model's context or the text are shorter.
        limit: windows at most; where the text has more, they are taken evenly spread over it.

    Raises:
        CheckpointError: the folder lacks config.json, tokenizer.json or, with `chat`, a valid chat
            template.
        RequestError: a file that cannot be read, names its bad line; a text of too few tokens.
    """
    if length < 2 or limit < 1:
        raise RequestError(f"{limit} windows of {length} tokens: expected at least 1 of 2 tokens")
    documents: list[Document]
    if path is None:
        files = bundled_texts()
        name, documents = BUNDLED_NAME, [*files]
    else:
        files = [read_text_file(path, WHAT)]
        name, documents = printable(path.name), _parse(path, files[0])
    tokenizer = load_text_tokenizer(folder, "calibration")
    texts = _render(documents, _load_template(folder)) if chat else [_plain(d) for d in documents]
    ids = [id for encoded in tokenizer.encode_all(texts) for id in encoded]
    length = min(length, _context(folder))
    if len(ids) < (least := min(length, LEAST_TOKENS)):
        raise RequestError(
            f"{WHAT} `{name}` has {len(ids)} tokens, expected at least {least}",
            hint="give a longer --calib file, best one of 10,000 tokens or more",
        )
    return CalibrationText(
        name=name,
        sha256=hashlib.sha256("".join(files).encode()).hexdigest(),
        samples=cut_samples(ids, length, limit),
        tokens=len(ids),
        chat=chat,
    )


def plain_texts(path: Path) -> list[str]:
    """The documents of a `.txt` or `.jsonl` file, turns as paragraphs.

    Raises:
        RequestError: it cannot be read; names its bad line.
    """
    return [_plain(document) for document in _parse(path, read_text_file(path, WHAT))]


def bundled_texts() -> list[str]:
    """The documents of the bundled text."""
    data = Path(__file__).with_name("data")
    return [read_text_file(data / name, WHAT) for name in BUNDLED_FILES]


def with_bundled(text: str) -> str:
    """A text with the bundled one behind it."""
    return "\n".join((text, *bundled_texts()))


def without_bundled(text: str) -> str:
    """A text without the bundled one that `with_bundled` has put behind it; any other as it is."""
    return text.removesuffix(with_bundled(""))


def cut_samples(ids: Sequence[int], length: int, limit: int) -> Tensor:
    """At most `limit` non-overlapping windows, evenly spread: [samples, T] int64.

    Args:
        ids: of the whole text, at least one.
        length: tokens of a window; T is smaller where the text is shorter.
    """
    T = min(length, len(ids))
    count = len(ids) // T
    windows = torch.tensor(ids[: count * T], dtype=torch.int64).view(count, T)
    taken = min(count, limit)
    return windows[[index * count // taken for index in range(taken)]]


def _parse(path: Path, text: str) -> list[Document]:
    if path.suffix == ".txt":
        return [text]
    if path.suffix != ".jsonl":
        raise RequestError(
            f"{WHAT} `{path}`: expected a .txt or .jsonl file, got `{path.suffix}`",
            hint="rename it, or convert it to one JSON object a line",
        )
    lines = enumerate(text.split("\n"), start=1)  # other line ends may stand inside JSON strings
    return [_parse_line(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _parse_line(line: str, where: str) -> Document:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{WHAT} `{where}` is not valid JSON: {error}") from None
    kinds = content.keys() & {"text", "messages"} if isinstance(content, dict) else set()
    if len(kinds) != 1:
        raise RequestError(
            f"{WHAT} `{where}`: expected an object with either `text` or `messages`",
            hint='write lines like {"text": "..."}',
        )
    if "text" in kinds:
        if not isinstance(content["text"], str):
            raise RequestError(f"{WHAT} `{where}`: `text` must be a string")
        _check_unicode(content["text"], where)
        return content["text"]
    turns = content["messages"]
    if not isinstance(turns, list) or not turns or not all(map(_is_turn, turns)):
        raise RequestError(
            f"{WHAT} `{where}`: `messages` must be a list of objects with `role` and `content`, "
            "both strings"
        )
    for turn in turns:
        _check_unicode(turn["content"], where)
    return turns


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(k), str) for k in ("role", "content"))


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise RequestError(f"{WHAT} `{where}` is not valid Unicode: {error}") from None


def _plain(document: Document) -> str:
    if isinstance(document, str):
        return document
    return "\n\n".join(turn["content"] for turn in document)


def _render(documents: Sequence[Document], render: Render) -> list[str]:
    conversations: list[list[Turn]] = []
    for document in documents:
        conversations += [document] if isinstance(document, list) else _as_chat(document)
    return [render(turns) for turns in conversations]


def _as_chat(text: str) -> list[list[Turn]]:
    """Paragraphs of a plain text, two by two; a last one without its answer is left out."""
    paragraphs = [part.strip() for part in PARAGRAPH_END.split(text) if part.strip()]
    if len(paragraphs) == 1:
        return [[{"role": "user", "content": paragraphs[0]}]]
    pairs = zip(paragraphs[::2], paragraphs[1::2], strict=False)
    return [
        [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        for said, answer in pairs
    ]


def _load_template(folder: Path) -> Render:
    template = load_chat_template(folder)
    if template is None:
        raise CheckpointError(
            f"`{folder}` has no chat template", hint="calibrate on plain text, without it"
        )

    def render(turns: list[Turn]) -> str:
        try:
            return template.render(turns, answer=False)
        except RequestError as error:
            start = str(turns[0]["content"])[:40]
            raise RequestError(
                f"messages that start with {start!r}: {error}", hint=error.hint
            ) from None

    return render


def _context(folder: Path) -> int:
    context = read_config(read_json(folder / CONFIG_FILE)).max_position_embeddings
    if context < 2:
        raise CheckpointError(
            f"`{folder / CONFIG_FILE}`: max_position_embeddings is {context}, expected at least 2"
        )
    return context


@contextmanager
def rereadable(path: Path) -> Iterator[Path]:
    """The path itself, or for a pipe a temporary file with its content.

    The file's name tells what its first line is: `pipe.jsonl` after an object of `text` or
    `messages`, else `pipe.txt`.

    Raises:
        RequestError: the pipe cannot be read; see `read_user_file`.
        ResourceError: the temporary file cannot be written.
    """
    if not _is_pipe(path):
        yield path
        return
    content = read_user_file(path, WHAT)
    with ExitStack() as stack:
        with disk_errors():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-"))
            copy = Path(folder) / ("pipe.jsonl" if _is_jsonl(content) else "pipe.txt")
            copy.write_bytes(content)
        yield copy


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        return False  # reading it will say why


def _is_jsonl(content: bytes) -> bool:
    try:
        first = json.loads(content.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and not first.keys().isdisjoint({"text", "messages"})

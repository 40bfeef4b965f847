"""Rendering of messages by a model's own chat template."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError, TooLongError
from lowbit.formats.files.reading import read_text
from lowbit.formats.text.child_process import WorkerError
from lowbit.formats.text.settings import SETTINGS_FILE, read_settings
from lowbit.formats.text.worker import Ask, Worker, blocking

TEMPLATE_FILE = "chat_template.jinja"
THINKING = "enable_thinking"  # name of the switch in templates
MAX_PROMPT_BYTES = 64_000_000  # of a prompt with any context; a million tokens take 5,000,000
MAX_TEMPLATE_BYTES = 1_000_000  # the longest published ones have 30,000
MESSAGE_BYTES = 16  # of a message beside its text: role, begin and end marks
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # keys for the reasoning; the first is standard


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and the special tokens it may name."""

    source: str  # jinja2
    special_tokens: Mapping[str, str]  # `bos_token`, `eos_token` and so on
    # process that renders it, under limits of time and memory
    worker: Worker = field(default_factory=Worker, compare=False, repr=False)

    def prepare(self) -> None:
        """Start the process and let it compile the template, without waiting for it.

        The first `render` reports a failure.
        """
        self.worker.submit(self.preparation)

    @property
    def preparation(self) -> dict[str, Any]:
        """The job that compiles the template."""
        return {"do": "compile", "source": self.source}

    async def render_later(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        answer: bool = True,
        max_bytes: int = MAX_PROMPT_BYTES,
        ask: Ask | None = None,
    ) -> str:
        """Render a conversation as transformers does.

        Args:
            messages: objects of plain JSON, with `role` and `content`.
            thinking: `enable_thinking` of the template; None leaves it to the template.
            tools: functions that the model may call, as objects of plain JSON.
            arguments: further values of the template, by name.
            answer: end with the prompt for the assistant's next turn.
            max_bytes: longest text; longer messages are refused before they are rendered.
            ask: gives the job to a process; None for `worker`, which blocks.

        Raises:
            TooLongError: more text than `max_bytes`.
            RequestError: messages that are not plain JSON or that the template refuses, a template
                without the thinking switch or one that breaks a limit.
            CheckpointError: the template is not valid jinja2.
            ResourceError: no process can be started.
        """
        if thinking is not None and THINKING not in self.source:
            raise RequestError(
                f"thinking cannot be switched: the chat template does not know `{THINKING}`",
                hint="this model has no switch for it; leave the setting out",
            )
        check_length(sum(map(_length, messages)), max_bytes)
        values = {
            **(arguments or {}),
            **self.special_tokens,
            "messages": [_as_transformers(message) for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": answer,
        }
        if thinking is not None:
            values[THINKING] = thinking
        job = {"do": "render", "source": self.source, "values": values, "most": max_bytes}
        try:
            text: str = await (self.worker.ask_blocking if ask is None else ask)(job)
        except WorkerError as error:
            raise self._explained(error, max_bytes) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the messages are not plain JSON: {error}") from None
        return text

    render = blocking(render_later)

    def _explained(self, error: WorkerError, max_bytes: int) -> LowbitError:
        """The error, in a sentence, for a template that failed."""
        subject = "the chat template"
        match error.kind:
            case "syntax":
                return CheckpointError(f"{subject} is not valid jinja2: {error}")
            case "time":
                reason = f"takes longer than {self.worker.seconds:g} s"
            case "memory":
                reason = f"takes more than {self.worker.memory_bytes >> 20} MiB of memory"
            case "output":
                return TooLongError(
                    f"{subject} writes over {max_bytes} characters, more than the context holds"
                )
            case "died":
                reason = f"ended the process that renders it ({error})"
            case _:
                return RequestError(f"{subject} refuses the messages: {error}")
        return RequestError(f"{subject} {reason}", hint="use another chat template")


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the template of a model folder; None where it has none.

    chat_template.jinja wins over tokenizer_config.json. Of several named templates, `default` is
    taken.

    Raises:
        CheckpointError: a template of the wrong type, or too long a one.
    """
    path = folder / TEMPLATE_FILE
    settings = read_settings(folder)
    try:
        source: Any = read_text(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        path = folder / SETTINGS_FILE
        source = _default_of(settings.template, path)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"`{path}`: chat_template is not a string")
    if len(source) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"`{path}`: chat_template has {len(source)} characters, expected at most "
            f"{MAX_TEMPLATE_BYTES}"
        )
    return ChatTemplate(source, settings.special_tokens)


def _default_of(template: Any, path: Path) -> Any:
    """The template named `default` if there are several; else the template itself."""
    if isinstance(template, dict):
        return template.get("default")
    if not isinstance(template, list):
        return template
    named = {}
    for entry in template:
        if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
            raise CheckpointError(f"`{path}`: chat_template lists {entry!r:.80}, no named template")
        if not isinstance(entry["name"], str):
            raise CheckpointError(f"`{path}`: a chat_template has the name {entry['name']!r:.80}")
        named[entry["name"]] = entry["template"]
    return named.get("default")


def _length(message: Mapping[str, Any]) -> int:
    """Lower bound of a message's bytes: its characters."""
    return MESSAGE_BYTES + sum(len(text) for text in _texts(message.values()))


def _texts(values: Iterable[Any]) -> Iterable[str]:
    return (value for value in values if isinstance(value, str))


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers passes it to templates: no None, reasoning under every key."""
    given = {key: value for key, value in message.items() if value is not None}
    found = [given[name] for name in REASONING if name in given]
    reasoning = next(filter(None, found), found[0] if found else None)  # "" beside a filled one
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def check_length(length: int, most: int) -> None:
    """Refuse a prompt that is too long for the context with any tokenizer.

    Args:
        length: bytes of the prompt, or a lower bound.
        most: bytes that the context can hold.

    Raises:
        TooLongError: `length` is above `most`.
    """
    if length > most:
        raise TooLongError(
            f"the prompt has {length} bytes or more, the context holds at most {most}"
        )

"""Fields that several bodies share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lowbit.runtime.serve.limits import MOST_CHOICES, MOST_STOP_CHARACTERS, MOST_STOPS


class Body(BaseModel):
    """An object whose fields are all known, and of the types that JSON gives them.

    Attributes:
        HARMLESS: fields that are taken and change nothing; the log names them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()

    def ignored(self) -> list[str]:
        """Harmless fields that were given a value."""
        given = self.model_fields_set & self.HARMLESS
        return sorted(name for name in given if getattr(self, name) is not None)

    def plain(self) -> dict[str, Any]:
        """Everything that was given and counts, as JSON has it."""
        return self.model_dump(exclude_none=True, exclude=set(self.HARMLESS), by_alias=True)


StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=MOST_STOPS)]


class StreamOptions(Body):
    """`stream_options`."""

    HARMLESS = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Body):
    """Fields by which tokens are chosen; those left out are the model's own."""

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    user: Any = None


class TextPart(Body):
    """A part of a message; a model of text reads no other."""

    HARMLESS = frozenset({"cache_control", "annotations"})
    type: Literal["text"]
    text: str
    cache_control: Any = None
    annotations: Any = None


def named_types(*known: str) -> BeforeValidator:
    """Name the type of a part that cannot be read, rather than what it lacks as another one."""

    def check(value: object) -> object:
        for part in value if isinstance(value, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                names = ", ".join(f"`{name}`" for name in known)
                raise ValueError(f"type `{kind[:40]}` is not supported, only {names}")
        return value

    return BeforeValidator(check)


Text = Annotated[str | list[TextPart], named_types("text")]


def text_of(content: "str | list[TextPart] | None") -> str:
    """Content as one string."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""

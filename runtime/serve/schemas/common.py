"""Fields that several bodies share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from lowbit.runtime.serve.limits import (
    MOST_CHOICES,
    MOST_IDS,
    MOST_PARTS,
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
)


class Body(BaseModel):
    """An object whose fields are all known, and of the types that JSON gives them.

    Every list names its longest length and `fail_fast`: an invalid body costs no more than a valid
    one.

    Attributes:
        HARMLESS: fields that are taken and change nothing; the log names them.
        NEUTRAL: values by field that mean the same as leaving the field out, as null always does.
        KNOWN: names of all fields in JSON.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    KNOWN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Collect the names of the fields."""
        cls.KNOWN = frozenset(each.alias or name for name, each in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        """Drop fields that say nothing, and all unknown ones but the first, which is refused."""
        if not isinstance(value, dict):
            return value
        keys = value.keys()
        if keys <= cls.KNOWN and cls.NEUTRAL.keys().isdisjoint(keys):
            return value
        kept: dict[Any, Any] = {}
        unknown = False
        for name, each in value.items():
            known = name in cls.KNOWN
            if (each is None and not known) or _is_one_of(each, cls.NEUTRAL.get(name, ())):
                continue
            if known or not unknown:
                kept[name] = each
            unknown |= not known
        return kept

    def ignored(self) -> list[str]:
        """Harmless fields that were given a value."""
        given = self.model_fields_set & self.HARMLESS
        return sorted(name for name in given if getattr(self, name) is not None)

    def plain(self) -> dict[str, Any]:
        """Everything that was given and counts, as JSON has it."""
        return self.model_dump(exclude_none=True, exclude=set(self.HARMLESS), by_alias=True)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """True for a neutral value; 1 is 1.0, and neither is true."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopList = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
Stops = Annotated[StopList, BeforeValidator(_as_list)]


def _numbers(value: object) -> object:
    """Refuse the first value that is no number; pydantic would list them all."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, bool) or not isinstance(each, int | float):
                raise ValueError(f"the bias of `{key[:40]}` is no number")
    return value


Biases = Annotated[dict[str, float], Field(max_length=MOST_IDS), BeforeValidator(_numbers)]


class StreamOptions(Body):
    """`stream_options`."""

    HARMLESS = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Hints(Body):
    """Fields about the server's own work, which no answer depends on."""

    HARMLESS = frozenset({"cache_prompt", "keep_alive", "request_id", "ttl"})
    cache_prompt: bool | None = None
    keep_alive: Any = None
    request_id: Any = None
    ttl: Any = None


class SamplingBody(Hints):
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
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None
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
        for part in value[:MOST_PARTS] if isinstance(value, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                names = ", ".join(f"`{name}`" for name in known)
                raise ValueError(f"type `{kind[:40]}` is not supported, only {names}")
        return value

    return BeforeValidator(check)


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS)]
Text = Annotated[str | TextParts, named_types("text")]


def text_of(content: "str | list[TextPart] | None") -> str:
    """Content as one string."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""

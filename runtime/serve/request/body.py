"""Bodies of requests: the fields that several share."""

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from lowbit.formats.sampling_ranges import MOST_BIASES
from lowbit.runtime.serve.errors import misspelt
from lowbit.runtime.serve.request.explain import got
from lowbit.runtime.serve.settings import MOST_CHOICES, MOST_STOP_CHARACTERS, MOST_STOPS

if TYPE_CHECKING:
    from lowbit.runtime.serve.request.contents import Content

IGNORED = "ignored"
MOST_LEFT_OUT = 8  # names of unknown fields of a body in the log, and in the header
MOST_COMPARED = 128  # unknown fields that are looked at for slips; forms of clients have fewer
LEAST_LETTERS = 5  # of a name with a slip; `top_a` is no slip of `top_k`
# Fields of messages, items and tools that clients always send and that change no answer.
QUIET = frozenset(
    (
        *("allowed_callers", "annotations", "cache_control", "caller", "citations", "data"),
        *("defer_loading", "eager_input_streaming", "encrypted_content", "end_turn", "id"),
        *("index", "input_examples", "is_error", "logprobs", "output_schema", "phase"),
        *("prompt_cache_breakpoint", "provider_specific_fields", "signature", "status", "type"),
    )
)
EXACT = 1 << 53  # below it a float holds every integer
Value = TypeVar("Value")
Ignored = Annotated[Value, IGNORED]  # type of a field that is accepted and changes nothing


class Body(BaseModel):
    """A JSON object whose fields are all known, with values of exactly the declared types.

    Every list declares its longest length and `fail_fast`, so that an invalid body costs no more
    than a valid one.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    # For a field, the values that mean the same as leaving it out, as null always does
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    KNOWN: ClassVar[frozenset[str]] = frozenset()  # names of all fields in JSON
    NAMED: ClassVar[frozenset[str]] = frozenset()  # them, and the names in `NEUTRAL`
    # Fields that are accepted and change nothing; the log names them
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    INTEGERS: ClassVar[frozenset[str]] = frozenset()  # fields of integers, in which 100.0 is 100

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Collect the names of the fields."""
        fields = cls.model_fields.items()
        cls.KNOWN = frozenset(each.alias or name for name, each in fields)
        cls.NAMED = cls.KNOWN | cls.NEUTRAL.keys()
        cls.INTEGERS = frozenset(
            each.alias or name for name, each in fields if _has_integer(each.annotation)
        )
        cls.IGNORED = frozenset(name for name, each in fields if IGNORED in each.metadata)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        """Drop neutral fields, and all unknown ones except the first, which is refused."""
        if not isinstance(value, dict):
            return value
        keys = value.keys()
        if cls.INTEGERS and float in map(type, value.values()):
            value = {name: cls._whole(name, each) for name, each in value.items()}
            keys = value.keys()
        if keys <= cls.KNOWN and cls.NEUTRAL.keys().isdisjoint(keys):
            return value
        kept: dict[Any, Any] = {}
        unknown = False
        for name, each in value.items():
            known = name in cls.KNOWN
            if (each is None and not known) or _is_one_of(each, cls.NEUTRAL.get(name, ())):
                continue
            if known or not unknown or cls.model_config["extra"] == "allow":
                kept[name] = each
            unknown |= not known
        return kept

    @classmethod
    def _whole(cls, name: object, value: object) -> object:
        """The integer that a number such as 100.0 stands for; else the value itself."""
        whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
        return int(value) if whole and name in cls.INTEGERS else value  # type: ignore[call-overload]

    def plain(self) -> dict[str, Any]:
        """Fields that were given, without ignored ones, as JSON has them."""
        return self.model_dump(exclude_none=True, exclude=set(self.IGNORED), by_alias=True)


class TolerantBody(Body):
    """A message, an item of history or a tool; its unknown fields are ignored and named."""

    model_config = ConfigDict(extra="allow", strict=True)

    def model_post_init(self, names: set[str] | None) -> None:
        """Drop unknown fields, and add their names to the context of the validation."""
        if self.__pydantic_extra__:
            if names is not None:
                unknown = self.__pydantic_extra__.items()
                names.update(name for name, each in unknown if name not in QUIET and _says(each))
            self.__pydantic_extra__.clear()


class SettingsBody(TolerantBody):
    """An object of settings; a misspelt field is refused, for it would change the answer."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_slips(cls, value: object) -> object:
        if isinstance(value, dict) and (slip := slip_in(value, cls.KNOWN)) is not None:
            raise ValueError(misspelt(*slip).message)
        return value


def slip_in(given: Mapping[str, object], known: Set[str]) -> tuple[str, str] | None:
    """The first unknown name with a value that is a known one with one slip, and that one.

    A name whose known one is given, too, is a client's own, as `topP` beside `top_p`.
    """
    unknown = sorted(name for name in given.keys() - known if given[name] is not None)
    lacking = [(_letters(each), each) for each in sorted(known - given.keys())]
    for name in unknown[:MOST_COMPARED]:
        letters = _letters(name)
        for each, meant in lacking:
            if each == letters or (abs(len(each) - len(letters)) < 2 and _is_slip(letters, each)):
                return name, meant
    return None


def _is_slip(name: str, known: str) -> bool:
    """True where one letter is missing, added or another, or two are swapped."""
    short, long = sorted((name, known), key=len)
    if len(short) < LEAST_LETTERS:
        return False
    pairs = enumerate(zip(short, long, strict=False))
    first = next((place for place, (a, b) in pairs if a != b), len(short))
    a, b = short[first:], long[first:]
    return b[1:] in (a, a[1:]) or (b[:2] == a[:2][::-1] and b[2:] == a[2:])


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _has_integer(annotation: Any) -> bool:
    """True if a field's type is an integer, maybe within bounds, or null."""
    parts = get_args(annotation)
    return annotation is int or (
        float not in parts and any(_has_integer(part) for part in parts if part is not annotation)
    )


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """True if the value is a neutral one; 1 equals 1.0, and neither equals true."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _says(value: object) -> bool:
    """True for a value that is not empty; false and 0 may change an answer."""
    return value is not None and value not in ("", [], {})


class ModelBody(Body):
    """A body that may name the model."""

    model: str | None = None
    _shows_images: bool = PrivateAttr(default=False)
    # Names of fields that are not known: its own, and `*.NAME` of messages, items and tools
    _left_out: Sequence[str] = ()

    @classmethod
    def read(cls, content: dict[str, Any]) -> Self:
        """The body with this content; fields that no API here has are left out.

        Raises:
            ValidationError: the content breaks the schema.
            ApiError: a field's name is misspelt.
        """
        names: set[str] = set()
        own: list[str] = []
        if content.keys() <= cls.NAMED:
            body = cls.model_validate(content, context=names)
        else:
            unknown = {name: each for name, each in content.items() if name not in cls.NAMED}
            given = {name: each for name, each in content.items() if name in cls.NAMED}
            if (slip := slip_in(unknown, cls.KNOWN - cls.IGNORED - given.keys())) is not None:
                raise misspelt(*slip)
            body = cls.model_validate(given, context=names)
            own = sorted(name for name, each in unknown.items() if _says(each))
        body._left_out = [*own, *(f"*.{name}" for name in sorted(names))]
        return body

    def left_out(self) -> list[str]:
        """Fields that are not known, and were given a value that is not empty."""
        found = [f"field {name}" for name in self._left_out[:MOST_LEFT_OUT]]
        more = len(self._left_out) - len(found)
        return [*found, f"{more} more fields"] if more else found

    def ignored(self) -> list[str]:
        """Ignored fields that were given a value."""
        given = self.model_fields_set & self.IGNORED
        return sorted(name for name in given if getattr(self, name) is not None)

    @property
    def shows_images(self) -> bool:
        """True if it has images that have to be decoded."""
        return self._shows_images

    @shows_images.setter
    def shows_images(self, found: bool) -> None:
        self._shows_images = found

    def contents(self) -> "Sequence[Content]":
        """Contents of its messages, in their order; some may hold images."""
        return ()


class RequestBody(ModelBody):
    """A body that must name the model; hints about the server's own work change no answer."""

    model: str
    cache_prompt: Ignored[bool | None] = None
    include_reasoning: Ignored[Any] = None
    keep_alive: Ignored[Any] = None
    num_ctx: Ignored[Any] = None
    preserve_thinking: Ignored[Any] = None
    reasoning: Ignored[Any] = None
    reasoning_format: Ignored[Any] = None
    repeat_penalty: Ignored[Any] = None
    request_id: Ignored[Any] = None
    return_progress: Ignored[Any] = None
    session_id: Ignored[Any] = None
    thinking: Ignored[Any] = None
    timings_per_token: Ignored[Any] = None
    ttl: Ignored[Any] = None


class AnswerBody(RequestBody):
    """A body that asks for answers."""

    stream: bool | None = None

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return 1


StopString = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _without_empty(stops: list[str]) -> list[str]:
    """Stops that are no empty text, which forms of clients send and which would end nothing."""
    return [each for each in stops if each]


StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
StopList = Annotated[StopStrings, AfterValidator(_without_empty)]
Stops = Annotated[StopList, BeforeValidator(_as_list)]


def _numbers(value: object) -> object:
    """Refuse the first value that is no number; pydantic would list all of them."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, bool) or not isinstance(each, int | float):
                raise ValueError(f"the bias of {got(key)} must be a number, got {got(each)}")
    return value


Biases = Annotated[dict[str, float], Field(max_length=MOST_BIASES), BeforeValidator(_numbers)]


class StreamOptions(SettingsBody):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Ignored[bool | None] = None


class DrawFields(Body):
    """Fields by which each token is drawn; those left out are the model's own."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama.cpp's and Ollama's name
    seed: int | None = None

    def sampling(self) -> dict[str, Any]:
        """Their values by the names of `SamplingParams`."""
        drawn = {name: getattr(self, name) for name in DRAWN}
        if self.repetition_penalty is None:
            drawn["repetition_penalty"] = self.repeat_penalty
        return drawn


DRAWN = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class SamplingBody(DrawFields, AnswerBody):
    """Fields that OpenAI's chats and completions have in common."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    user: Ignored[Any] = None

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1


def sampling_options(
    body: SamplingBody, max_new_tokens: int | None, logprobs: int | None
) -> dict[str, Any]:
    """Fields of `Asked` that OpenAI's chats and completions have in common.

    Args:
        logprobs: number of likeliest tokens to report for each token; None reports none.
    """
    return {
        "sampling": {**body.sampling(), "logit_bias": body.logit_bias},
        "max_new_tokens": max_new_tokens,
        "stops": tuple(body.stop or ()),
        "stop_ids": tuple(body.stop_token_ids or ()),
        "ignore_stops": bool(body.ignore_eos),
        "logprobs": logprobs,
    }


# Fields of other APIs that change an answer, and are refused by name with any value. Any other that
# is not known is left out.
MEANT = (
    *("adapter", "adapters", "audio", "chat_template", "context", "conversation", "ebnf"),
    *("format", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json"),
    *("guided_regex", "input", "instructions", "json_schema", "logits_processors", "lora_path"),
    *("max_completion_tokens", "max_length", "max_new_tokens", "max_output_tokens", "max_tokens"),
    *("messages", "n_predict", "num_predict", "output_config", "output_format"),
    *("previous_response_id", "prompt", "prompt_logprobs", "regex", "response_format"),
    *("stop_regex", "stop_sequences", "structural_tag", "structured_outputs", "system"),
    *("template", "text", "tools"),
)

# Values that other clients send for fields that they do not use, and that change nothing here; any
# other value is refused by the field's name. First those of samplers and of output, at the values
# that switch them off: fields of OpenAI, vLLM, SGLang, llama.cpp, Ollama, TGI and OpenRouter.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(MEANT, ()),
    **dict.fromkeys(
        (
            *("allowed_token_ids", "bad_words", "documents", "images", "logit_bias", "lora"),
            *("models", "plugins", "response_fields", "transforms"),
        ),
        ([],),
    ),
    **dict.fromkeys(
        ("best_of", "dynatemp_exponent", "length_penalty", "tfs_z", "typical_p", "typ_p"), (1,)
    ),
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), (True,)
    ),
    **dict.fromkeys(
        (
            *("dry_multiplier", "dynatemp_range", "min_keep", "min_tokens", "mirostat"),
            *("n_discard", "n_keep", "n_probs", "priority", "t_max_predict_ms", "top_a"),
            "xtc_probability",
        ),
        (0,),
    ),
    **dict.fromkeys(("dry_penalty_last_n", "id_slot", "top_n_sigma"), (-1,)),
    **dict.fromkeys(
        (
            *("early_stopping", "enable_search", "include_stop_str_in_output", "penalize_nl"),
            *("post_sampling_probs", "raw", "return_full_text", "return_hidden_states"),
            *("return_token_ids", "return_tokens"),
            *("return_tokens_as_token_ids", "safe_prompt"),
            *("use_beam_search", "watermark"),
        ),
        (False,),
    ),
    **dict.fromkeys(("mm_processor_kwargs", "options", "provider", "vllm_xargs"), ({},)),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "grammar": ("",),
    "response_format": ({"type": "text"},),
    "stop_sequences": ([],),
    "text": ({}, {"format": {"type": "text"}}),
    "tools": ([],),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "suffix": ("",),
    "xtc_threshold": (0.1,),
}

# Fields of chats alone, at what a chat does anyway.
TURNS: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "background": (False,),
    "deferred": (False,),
    "echo": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}

# Fields of OpenAI's other APIs, at what /v1/responses and /v1/messages do anyway.
PLAIN: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "ignore_eos": (False,),
    "logit_bias": ({}, []),
    "logprobs": (False,),
    "n": (1,),
    "stop": ([],),
    "stop_token_ids": ([],),
}

"""Settings of an answer: the record that commands make of their options, a file of a line."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lowbit.runtime.conversation.turns import Conversation

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model, Options
    from lowbit.runtime.state.sampler import SamplingParams
    from lowbit.runtime.text.chat import Message


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Everything of a request but its prompt.

    Attributes:
        sampling: parameters by name; those left out are the model's.
        max_new_tokens: longest answer; None for as many tokens as the context holds.
        thinking: switches a reasoning model's thinking; None leaves it to the template.
        raw: continue the prompt as it is, without a template.
        system: message before a prompt that is text.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    raw: bool = False
    max_thinking_tokens: int | None = None
    json_schema: dict[str, Any] | None = None
    system: str | None = None

    def params(self, defaults: "SamplingParams") -> "SamplingParams":
        """Sampling parameters of a model with these defaults.

        Raises:
            RequestError: a value is out of its range.
        """
        return replace(defaults, **self.sampling)

    def prompt(self, text: str) -> "str | list[Message]":
        """A text as the prompt that asks the model for an answer."""
        return text if self.raw else Conversation(self.system).prompt(text)

    def keywords(self, model: "Model") -> "Options":
        """Keywords of a request to a model.

        Raises:
            RequestError: a sampling parameter is out of its range, or the schema cannot be used.
        """
        schema = self.json_schema
        return {
            "sampling": self.params(model.defaults),
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            "raw": self.raw,
            "max_thinking_tokens": self.max_thinking_tokens,
            "grammar": None if schema is None else model.grammars.json_schema(schema),
        }

"""The model as a language model of lm-evaluation-harness; importing this needs the harness."""

import math
from collections.abc import Callable
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lowbit.formats.errors import RequestError
from lowbit.formats.text.settings import read_settings
from lowbit.runtime.engine.model import Model
from lowbit.runtime.evaluate.scoring import carry_on, read_continuation, score
from lowbit.runtime.text.chat import Message, render_prompt


class LanguageModel(TemplateLM):  # type: ignore[misc]
    """Scores one text after another; those of one context follow each other.

    Attributes:
        truncated: requests that lost their beginning.
    """

    def __init__(
        self,
        model: Model,
        chat: bool = False,
        thinking: bool | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Let a model answer; see `TaskSettings` for the switches."""
        super().__init__()
        self._model, self._chat, self._thinking = model, chat, thinking
        self._progress = progress
        tokens = read_settings(model.folder).special_tokens
        self._prefix = tokens.get("bos_token") or tokens.get("eos_token")
        self.truncated = 0

    @property
    def tokenizer_name(self) -> str:
        """Folder of the model."""
        return str(self._model.folder.resolve())

    @property
    def eot_token_id(self) -> int:
        """Token that stands before a text without context."""
        prefix = self._prefix
        token = None if prefix is None else self._model.tokenizer.token_id(prefix)
        if token is None:
            raise RequestError(
                "the task has texts without context, which begin with a token that "
                "tokenizer_config.json does not name (`bos_token` or `eos_token`)"
            )
        return token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text, framed unless it begins with the frame's first token."""
        if add_special_tokens is None:
            add_special_tokens = self._prefix is None or not string.startswith(self._prefix)
        return self._model.tokenizer.encode(string, framed=add_special_tokens)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations after contexts; True for those that are greedy."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = []
        for done, (_text, context, continuation) in enumerate(requests, start=1):
            scores.append(score(self._model, context, continuation))
            self.truncated += scores[-1].truncated
            self._progress(done, len(requests))
        return [(found.log_likelihood, found.greedy) for found in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of whole texts, in windows that share nothing."""
        sums = []
        for done, request in enumerate(requests, start=1):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self._model.context, 1
            )
            parts = [score(self._model, *make_disjoint_window(window)) for window in windows]
            sums.append(math.fsum(part.log_likelihood for part in parts))
            self._progress(done, len(requests))
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Texts that follow prompts, as many at a time as the model has sequences."""
        asked = (
            (self.tok_encode(prompt), read_continuation(settings, seed=number))
            for number, (prompt, settings) in enumerate((each.args for each in requests), start=1)
        )
        texts = [""] * len(requests)
        made = carry_on(self._model, asked, self._chat)
        for done, (number, text, cut) in enumerate(made, start=1):
            texts[number] = text
            self.truncated += cut
            self._progress(done, len(requests))
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for the next answer, or for the rest of one that is begun."""
        model = self._model
        if model.template is None:
            raise RequestError(f"`{model.folder}` has no chat template")
        turns = chat_history if add_generation_prompt else chat_history[:-1]
        begun = "" if add_generation_prompt else chat_history[-1]["content"]
        asked = [Message(role=turn["role"], content=turn["content"]) for turn in turns]
        return render_prompt(model.template, asked, self._thinking).text + begun

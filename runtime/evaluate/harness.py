"""The model as lm-evaluation-harness wants one. Importing this module needs no harness."""

import math
from collections.abc import Callable
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.text.settings import read_settings
from lowbit.runtime.engine.model import Model
from lowbit.runtime.evaluate.scoring import carry_on, read_continuation, score
from lowbit.runtime.text.chat import Message, render_prompt

Progress = Callable[[int, int], None]  # answered, in all


def language_model(
    model: Model,
    chat: bool = False,
    thinking: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> Any:
    """The model as the harness wants one: an `lm_eval.api.model.TemplateLM`.

    Its `truncated` counts the requests that lost their beginning.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = model.tokenizer
    tokens = read_settings(model.folder).special_tokens
    prefix = tokens.get("bos_token") or tokens.get("eos_token")
    prefix_id = None if prefix is None else tokenizer.token_id(prefix)

    class Lowbit(TemplateLM):  # type: ignore[misc]
        """Answers one request after another; those of one context follow each other."""

        tokenizer_name = str(model.folder.resolve())
        truncated = 0

        @property
        def eot_token_id(self) -> int:
            """Token that stands before a text without context."""
            if prefix_id is None:
                raise RequestError(
                    "the task has texts without context, which begin with a token that "
                    "tokenizer_config.json does not name (`bos_token` or `eos_token`)"
                )
            return prefix_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """Ids of a text, framed unless it begins with the frame's first token."""
            if add_special_tokens is None:
                add_special_tokens = prefix is None or not string.startswith(prefix)
            return tokenizer.encode(string, framed=add_special_tokens)

        def loglikelihood(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[tuple[float, bool]]:
            """Log-likelihoods of continuations after contexts, and whether each is greedy."""
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return found

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            scores = []
            for done, (_text, context, continuation) in enumerate(requests, start=1):
                scores.append(score(model, context, continuation))
                self.truncated += scores[-1].truncated
                progress(done, len(requests))
            return [(found.log_likelihood, found.greedy) for found in scores]

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = True
        ) -> list[float]:
            """Log-likelihoods of whole texts, in windows that share nothing."""
            sums = []
            for done, request in enumerate(requests, start=1):
                windows = get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, model.context, 1
                )
                parts = [score(model, *make_disjoint_window(window)) for window in windows]
                sums.append(math.fsum(part.log_likelihood for part in parts))
                progress(done, len(requests))
            return sums

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            """Texts that follow prompts."""
            texts = []
            for done, request in enumerate(requests, start=1):
                prompt, settings = request.args
                wanted = read_continuation(settings, seed=done)
                text, cut = carry_on(model, self.tok_encode(prompt), wanted, chat)
                self.truncated += cut
                texts.append(text)
                progress(done, len(requests))
            return texts

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """The prompt for the next answer, or for the rest of one that is begun."""
            return _render(model, chat_history, add_generation_prompt, thinking)

    return Lowbit()


def _render(
    model: Model, messages: list[dict[str, str]], complete: bool, thinking: bool | None
) -> str:
    """The chat's prompt; where the last message is not complete, the answer begins with it."""
    if model.template is None:
        raise RequestError(f"`{model.folder}` has no chat template")
    asked = [Message(role=turn["role"], content=turn["content"]) for turn in messages]
    begun = "" if complete else asked.pop()["content"]
    return render_prompt(model.template, asked, thinking) + begun

"""Control tokens in the text of users, tools and files, told apart from those of a chat template.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever it is spelled, so a message
could end its own turn and begin one of the system. Here such places of a conversation are marked
before the template sees them, by an unused character behind their first one. What the template
writes itself has no mark. The tokenizer takes marked places for the plain text that they are.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lowbit.formats.errors import RequestError

# Characters that stand for nothing, and then those for private use.
MARKS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900))
NOTHING = r"(?!)"  # is never found
SHAPED = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Tokens of one tokenizer that control a model where they stand in its prompt.

    Attributes:
        texts: of the tokens.
        shaped: matches those in angle brackets, and other words in them.
        others: matches the others.
    """

    texts: frozenset[str]
    shaped: re.Pattern[str]
    others: re.Pattern[str]

    def held_by(self, text: str) -> bool:
        """Tell if a text spells one."""
        if self.others.search(text) is not None:
            return True
        return any(found[0] in self.texts for found in self.shaped.finditer(text))

    def marked(self, value: Any, mark: str, but: Collection[str] = ()) -> Any:
        """Plain JSON with the mark behind the first character of every control token.

        Args:
            value: texts, and lists and objects of them; others stay as they are.
            mark: to be put there.
            but: texts of tokens that are left alone.

        Raises:
            RecursionError: too deep nesting.
        """
        match value:
            case str():
                return self._marked(value, mark, but)
            case Mapping():
                return {
                    self.marked(key, mark, but): self.marked(item, mark, but)
                    for key, item in value.items()
                }
            case list() | tuple():
                return [self.marked(item, mark, but) for item in value]
        return value

    def _marked(self, text: str, mark: str, but: Collection[str]) -> str:
        def marked(found: re.Match[str]) -> str:
            word = found[0]
            return word if word not in self.texts or word in but else word[0] + mark + word[1:]

        before = ""
        while text != before:  # one token may overlap another
            before, text = text, self.others.sub(marked, text)
        return self.shaped.sub(marked, text)


def control_tokens(added: Collection[tuple[str, bool]]) -> ControlTokens:
    """The control tokens of a tokenizer: those that are special, or look like `<think>`.

    Others are text that has a token of its own, such as a run of spaces.

    Args:
        added: texts of the added tokens, and whether they are special.
    """
    known = {text: SHAPED.fullmatch(text) is not None for text, special in added if special}
    known |= {text: True for text, _ in added if SHAPED.fullmatch(text)}
    shaped = [text for text, is_shaped in known.items() if is_shaped]
    others = [text for text, is_shaped in known.items() if not is_shaped and len(text) > 1]
    longest = max(map(len, shaped), default=0) - 2
    words = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    return ControlTokens(
        texts=frozenset(shaped + others),
        shaped=re.compile(rf"<[^<>\s]{{1,{longest}}}>" if shaped else NOTHING),
        others=re.compile(words or NOTHING),
    )


def choose_mark(texts: Iterable[str]) -> str:
    """A character that none of the texts has, neither itself nor as an escape of JSON.

    Raises:
        RequestError: they have all that could be taken.
    """
    used: set[str] = set()
    escaped: set[str] = set()
    for text in texts:
        used.update(text)
        escaped.update(found.lower() for found in re.findall(r"\\u([0-9a-fA-F]{4})", text))
    for code in chain(*MARKS):
        if chr(code) not in used and f"{code:04x}" not in escaped:
            return chr(code)
    raise RequestError(
        "a conversation that spells control tokens has every character for private use",
        hint="leave out one of them",
    )


def texts_of(value: Any) -> Iterator[str]:
    """Every text of plain JSON, keys of objects included, however deep it nests."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += each
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each

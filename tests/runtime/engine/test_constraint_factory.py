"""A grammar begins where the answer of the model's template begins."""

import pytest

from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.runtime.engine.constraints import ConstraintFactory
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.thinking import shows_thinking
from lowbit.runtime.text.tokenizer import load_tokenizer
from tests.runtime.text.templates import BUNDLED, template_of

pytest.importorskip("llguidance")
SWITCH = load_chat_template(BUNDLED)  # knows of thinking that it is switched off, no more
assert SWITCH is not None
EARLIER = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
BEGUN = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


TOKENIZER = load_tokenizer(BUNDLED)


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return Grammars(TOKENIZER, TOKENIZER.vocabulary, TOKENIZER.stop_ids()).json_object()


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (SWITCH, False),
        (ChatTemplate("{{ messages[0].content }}", {}), False),
        (template_of("qwen3"), True),
        (template_of("qwen3.5"), True),
        (ChatTemplate(EARLIER, {}), True),
        (ChatTemplate(BEGUN, {}), True),
        (ChatTemplate("{{ raise_exception('<think>') }}", {}), True),
    ],
    ids=["switch", "none", "qwen3", "qwen3.5", "earlier", "begun", "refuses"],
)
def test_only_a_template_with_a_place_for_reasoning_lets_a_grammar_wait(
    grammar: Grammar, template: ChatTemplate, shown: bool
) -> None:
    assert shows_thinking(template) is shown
    tokenizer = TOKENIZER
    factory = ConstraintFactory(tokenizer, template, tokenizer.vocabulary, tokenizer.stop_ids())
    opening = tokenizer.token_id("<think>")
    assert opening is not None
    for text, opens in (
        ("<|im_start|>assistant\n", shown),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ):
        limit = factory.make(tokenizer.encode(text), "answer", None, grammar)
        assert limit is not None
        mask = limit.mask()
        assert mask is not None
        assert bool(int(mask[opening // 32]) >> opening % 32 & 1) is opens

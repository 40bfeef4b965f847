"""Bits that a model needs for a byte of text, which models of different tokenizers share."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.original.divergence import log_partition
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.progress import Advance
from lowbit.convert.original.runnable import require_language_model
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import (
    HEAD_ROWS,
    HEAD_TOKENS,
    blocks,
    pass_through_all,
    scored_states,
)
from lowbit.convert.original.weights import open_weights
from lowbit.convert.texts.evaluation import Text, tokenize
from lowbit.formats.architectures import read_config
from lowbit.formats.text.tokenizer import load_text_tokenizer

WINDOW = 256  # tokens; the bundled texts of other languages have two or more such windows


def check_measurable(folder: Path, texts: Sequence[Text]) -> None:
    """Refuse what `text_bits` would refuse, before any other work."""
    config = open_weights(folder).checkpoint.config
    require_language_model(config, str(folder))
    tokenize(folder, texts, read_config(config).max_position_embeddings, WINDOW)


def text_bits(
    folder: Path, texts: Sequence[Text], device: torch.device, advance: Advance
) -> tuple[float, ...]:
    """Bits a byte of every text, in FP32, a layer at a time.

    A text is cut into windows of 256 tokens of the model's own; the first token of each is context
    alone, and a rest that fills no window is left out. The bytes are those of the tokens scored.

    Args:
        folder: of a model that is not packed.
        texts: each of at least two tokens, the others of a window.
        advance: told of 1 after every layer, and after the head.

    Raises:
        LowbitError: a text that is too short, or a model that transformers does not run.
    """
    weights = open_weights(folder)
    context = weights.checkpoint.sizes.max_position_embeddings
    cut = tokenize(folder, texts, context, WINDOW)
    windows = torch.cat([text.windows for text in cut])
    model = load_layered_model(weights, windows.shape[1], device)
    nats = _nats(model, windows, device, advance).view(len(windows), -1).sum(1)
    sizes = _sizes(folder)
    result, first = [], 0
    for text in cut:
        count = len(text.windows)
        scored = sum(sizes[id] for id in text.windows[:, 1:].reshape(-1).tolist())
        result.append(float(nats[first : first + count].sum()) / math.log(2) / scored)
        first += count
    return tuple(result)


def _nats(model: LayeredModel, windows: Tensor, device: torch.device, advance: Advance) -> Tensor:
    """Negative log-likelihood of every token but each window's first: [windows * (T - 1)]."""
    with alone_on_threads(device) as pool:
        hidden = pass_through_all(model, windows, device, pool, advance)
        states = scored_states(model, hidden)
        total = log_partition(model, states, pool)
    labels = windows[:, 1:].reshape(-1).to(device)
    chosen = torch.empty_like(total)
    for first, rows in model.weights.rows(model.head, HEAD_ROWS, device):
        here = ((labels >= first) & (labels < first + len(rows))).nonzero()[:, 0]
        for part in (here[some] for some in blocks(len(here), HEAD_TOKENS[device.type])):
            chosen[part] = torch.linalg.vecdot(states[part], rows[labels[part] - first]).double()
    advance(1)
    return (total - chosen).cpu()


def _sizes(folder: Path) -> dict[int, int]:
    """Bytes of every token of a byte-level tokenizer, by id."""
    hub = load_text_tokenizer(folder).hub
    added = hub.get_added_tokens_decoder()
    sizes = {id: len(text) for text, id in hub.get_vocab(with_added_tokens=False).items()}
    return sizes | {id: len(token.content.encode()) for id, token in added.items()}

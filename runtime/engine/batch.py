"""Decodes several sequences together, greedy: a step takes one token of each through the layers.

A step reads the weights once for all of them. Each prompt is prefilled alone; on a GPU the steps
are CUDA graphs, one for each reach of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.engine import nonfinite_error
from lowbit.runtime.engine.graphs import aside, recorded
from lowbit.runtime.engine.limits import MOST_SEQUENCES
from lowbit.runtime.engine.memory import check_batch
from lowbit.runtime.engine.model import Model
from lowbit.runtime.models.loader import Decoder
from lowbit.runtime.state.cache import KVCache
from lowbit.runtime.state.sampling import SamplingParams

GREEDY = SamplingParams()


@dataclass(slots=True)
class Batch:
    """Sequences that are decoded together.

    Attributes:
        cache: of all of them; they may have different lengths.
        tokens: [B] int64 on the device, the last token of each, not in the cache yet.
        vocabulary: real tokens; ids from here on are padding and never chosen.
        finite: [B] bool on the device, whether the largest logit of every step so far was finite.
    """

    decoder: Decoder
    cache: KVCache
    tokens: Tensor
    vocabulary: int
    finite: Tensor
    _graphs: "dict[int, torch.cuda.CUDAGraph]" = field(default_factory=dict)  # by the cache's reach

    @property
    def on_gpu(self) -> bool:
        """True if steps run as CUDA graphs."""
        return self.tokens.is_cuda

    def decode(self, steps: int) -> Tensor:
        """The next tokens of every sequence: [steps, B] int64, on the device.

        The host does not wait for them.

        Raises:
            RequestError: the longest sequence does not have room for so many.
        """
        if self.cache.length + steps > self.cache.context:
            raise RequestError(
                f"{self.cache.length} + {steps} tokens do not fit the cache of {self.cache.context}"
            )
        chosen = self.tokens.new_empty(steps, self.cache.sequences)
        for row in chosen:
            self._launch()
            row.copy_(self.tokens)
        return chosen

    def capture(self, longest: int) -> None:
        """Record the steps after a longest prompt of so many tokens, while the cache is empty.

        For each reach a step is run too; the prompts overwrite what it leaves.
        """
        lengths = range(longest + 1, self.cache.context + 1)
        for reach in sorted({self.cache.reach_for(length) for length in lengths}):
            self.cache.reach = reach
            with aside():
                self._step()  # compiles kernels, which cannot happen during the capture
            self._graphs[reach] = recorded(self._step, self._graphs)

    def _launch(self) -> None:
        self.cache.reach = self.cache.reach_for(self.cache.length + 1)
        if self.on_gpu:
            self._graphs[self.cache.reach].replay()
        else:
            self._step()
        self.cache.length += 1

    def _step(self) -> None:
        hidden = self.decoder.hidden(self.tokens, self.cache)
        logits = self.decoder.logits(hidden)  # [B, V]
        largest, ids = logits[:, : self.vocabulary].max(-1)
        self.tokens.copy_(ids)
        self.finite.logical_and_(largest.isfinite())
        self.cache.position.add_(1)


def decode_batch(
    model: Model, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """The likeliest continuation of each prompt: `new_tokens` ids each.

    Nothing stops early: whoever wants texts cuts them at the model's `stop_ids`. The products of
    several tokens round differently from those of one, so that in BF16 a near tie may fall
    otherwise than in `Model.generate`.

    Args:
        model: loaded; what it held is dropped.
        prompts: 1 to MOST_SEQUENCES, of any lengths.
        new_tokens: at least 1.

    Raises:
        RequestError: too many prompts or none, one that cannot be run, or no room for `new_tokens`
            after the longest.
        ResourceError: the caches of so many sequences do not fit into free memory.
        CheckpointError: the logits of a sequence are NaN or infinite.
    """
    batch = start_batch(model, prompts, new_tokens)
    first = batch.tokens[None].clone()
    chosen = torch.cat((first, batch.decode(new_tokens - 1))).T
    for prompt, ids, finite in zip(prompts, chosen, batch.finite.tolist(), strict=True):
        if not finite:
            raise nonfinite_error(len(prompt) + len(ids))
    return chosen.tolist()


def start_batch(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> "Batch":
    """A batch whose prompts have been run, with the first new token of each.

    `decode` gives up to `new_tokens - 1` more. Arguments and errors as in `decode_batch`.
    """
    check_sequences(len(prompts))
    if new_tokens < 1:
        raise RequestError(f"`new_tokens` must be at least 1, got {new_tokens}")
    engine = model.engine
    for prompt in prompts:
        engine.check(prompt)
    longest = max(map(len, prompts))
    if new_tokens > engine.room(longest):
        raise RequestError(
            f"{longest} + {new_tokens} tokens do not fit the context of {model.context}"
        )
    context = longest + new_tokens - 1  # the last token needs no row
    check_batch(model.opened, model.device, model.dtype, len(prompts), context)
    batch = Batch(
        decoder=engine.decoder,
        cache=engine.decoder.new_cache(context, model.dtype, model.device, len(prompts)),
        tokens=torch.zeros(len(prompts), dtype=torch.int64, device=model.device),
        vocabulary=engine.sampler.vocabulary,
        finite=torch.ones(len(prompts), dtype=torch.bool, device=model.device),
    )
    if batch.on_gpu:
        batch.capture(longest)
        batch.finite.fill_(True)  # the steps before the capture ran over an empty cache
    for index, prompt in enumerate(prompts):
        engine.forget()
        [batch.tokens[index]] = engine.generate(prompt, GREEDY, 1)
        batch.cache.put(index, engine.cache)
    return batch


def check_sequences(count: int) -> None:
    """Refuse a number of sequences that cannot be decoded together.

    Raises:
        RequestError: it is not 1 to MOST_SEQUENCES.
    """
    if not 1 <= count <= MOST_SEQUENCES:
        raise RequestError(
            f"{count} sequences cannot be decoded together", hint=f"1 to {MOST_SEQUENCES} can"
        )

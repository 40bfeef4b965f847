"""The next token from logits, on the logits' device and without waiting for the host.

Filters apply in the order of transformers: penalties, temperature, top-k, top-p, min-p. Tokens
are sorted first, so each filter keeps a prefix. Probabilities become 40-bit integers, whose sums
are exact in any order: the same seed on the same device gives the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.formats.generation import GenerationConfig
from lowbit.formats.sampling_ranges import SEED, SEEDS, SETTINGS

MASS_BITS = 40  # 2^40 * a vocabulary of 2^18 stays far below 2^63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that choose the next token; the defaults choose the likeliest.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens; 0 is off. Of equals at the border, k in total stay.
        top_p: only the likeliest tokens that together reach this probability.
        min_p: only tokens at least this likely relative to the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt and the output; 1 is off.
        presence_penalty: subtracted from the logits of every token of the output; 0 is off.
        seed: of the random numbers; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, field in SETTINGS.items():
            value = getattr(self, name)
            if not field.allows(value) and not (name == SEED.key and value is None):
                raise RequestError(f"`{name}` must be {field.expected}, got {shown(value)}")

    @property
    def penalized(self) -> bool:
        """True if tokens that have occurred are treated differently."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0


def sampling_defaults(config: GenerationConfig) -> SamplingParams:
    """The parameters that a generation_config.json asks for, with a random seed."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
    )


@dataclass(slots=True)
class Sampler:
    """The state of sampling one sequence; tensors stay where they are, so a graph can be captured.

    Attributes:
        vocabulary: real tokens; ids from here on are padding and never chosen.
        params: values that fill the tensors.
        knobs: [5] float64: temperature, top_p, min_p, repetition and presence penalty.
        uniforms: [T] float64 in [0, 1), one for each token of the request.
        drawn: [1] int64, how many have been used.
        seen: [vocabulary] bool, tokens of the prompt and the output.
        produced: [vocabulary] bool, tokens of the output.
        nonfinite: [1] int64, -1 where the largest of the last logits was NaN or infinite, which
            leaves nothing to choose by; else 0.
    """

    vocabulary: int
    params: SamplingParams
    knobs: Tensor
    uniforms: Tensor
    drawn: Tensor
    nonfinite: Tensor
    seen: Tensor
    produced: Tensor

    @property
    def shape(self) -> tuple[bool, int, bool]:
        """Key of the operations that `sample` runs; a captured graph is good for one key."""
        return self.params.temperature == 0.0, self.params.top_k, self.params.penalized

    def snapshot(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of what a step changes."""
        return self.drawn.clone(), self.seen.clone(), self.produced.clone()

    def restore(self, snapshot: tuple[Tensor, Tensor, Tensor]) -> None:
        """Go back to a snapshot."""
        for now, before in zip((self.drawn, self.seen, self.produced), snapshot, strict=True):
            now.copy_(before)

    def configure(self, params: SamplingParams) -> None:
        """Take over parameters; from here on `sample` runs the operations of their shape."""
        self.params = params
        self.knobs.copy_(
            torch.tensor(
                [
                    params.temperature,
                    params.top_p,
                    params.min_p,
                    params.repetition_penalty,
                    params.presence_penalty,
                ],
                dtype=torch.float64,
            )
        )

    def start(self, params: SamplingParams, prompt: Sequence[int], count: int) -> int:
        """Begin a request of up to `count` new tokens; returns the seed in use."""
        self.configure(params)
        seed = params.seed
        if seed is None:
            seed = torch.Generator().seed() % SEEDS
        generator = torch.Generator().manual_seed(seed)
        self.uniforms[:count] = torch.rand(count, dtype=torch.float64, generator=generator).to(
            self.uniforms.device
        )
        self.drawn.zero_()
        self.produced.zero_()
        self.seen.zero_()
        if params.penalized:
            known = [id for id in prompt if id < self.vocabulary]  # padding has no logit to weaken
            self.seen[torch.tensor(known, dtype=torch.int64, device=self.seen.device)] = True
        return seed


def new_sampler(vocabulary: int, tokens: int, device: str) -> Sampler:
    """A sampler for requests of up to `tokens` new tokens."""
    return Sampler(
        vocabulary=vocabulary,
        params=SamplingParams(),
        knobs=torch.zeros(5, dtype=torch.float64, device=device),
        uniforms=torch.zeros(tokens, dtype=torch.float64, device=device),
        drawn=torch.zeros(1, dtype=torch.int64, device=device),
        nonfinite=torch.zeros(1, dtype=torch.int64, device=device),
        seen=torch.zeros(vocabulary, dtype=torch.bool, device=device),
        produced=torch.zeros(vocabulary, dtype=torch.bool, device=device),
    )


def sample(logits: Tensor, sampler: Sampler) -> Tensor:
    """Choose a token and note it as seen; note too whether the logits were finite.

    Args:
        logits: [1, V] float32; columns from `vocabulary` on are ignored.
        sampler: started for this request; its counter and its sets are updated.

    Returns:
        [1] int64.
    """
    params = sampler.params
    scores = logits[0, : sampler.vocabulary]
    if params.penalized:
        scores = penalize(scores, sampler)
    largest, token = scores.max(dim=0, keepdim=True)  # NaN counts as the largest
    torch.sub(largest.isfinite().long(), 1, out=sampler.nonfinite)
    if params.temperature != 0.0:
        uniform = sampler.uniforms.index_select(0, sampler.drawn)
        token = draw(scores, params.top_k, sampler.knobs, uniform)
    sampler.drawn.add_(1)
    if params.penalized:
        sampler.seen.index_fill_(0, token, True)
        sampler.produced.index_fill_(0, token, True)
    return token


def advance(logits: Tensor, sampler: Sampler, token: Tensor, position: Tensor) -> None:
    """`sample` into token [1] int64, with position [1] moved on by one."""
    token.copy_(sample(logits, sampler))
    position.add_(1)


def penalize(scores: Tensor, sampler: Sampler) -> Tensor:
    """Scores [V] with the repetition and then the presence penalty applied."""
    repetition, presence = sampler.knobs[3], sampler.knobs[4]
    wide = scores.double()
    weaker = torch.where(wide < 0, wide * repetition, wide / repetition)
    return torch.where(sampler.seen, weaker, wide) - sampler.produced * presence


def kept(scores: Tensor, top_k: int, knobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that pass the filters.

    Args:
        scores: [V], any float dtype.
        top_k: tokens to look at, 0 for all.
        knobs: see `Sampler`.

    Returns:
        ids [k] int64 from the likeliest down, their cumulative mass [k] int64, and how many of
        them [1] pass top-p and min-p.
    """
    temperature, top_p, min_p = knobs[0], knobs[1], knobs[2]
    if 0 < top_k < scores.shape[0]:
        values, ids = scores.topk(top_k)
    else:
        values, ids = scores.sort(descending=True, stable=True)
    wide = values.double()
    odds = ((wide - wide[0]) / temperature).exp()  # relative to the likeliest
    mass = (odds * 2**MASS_BITS).round().long()
    total = mass.cumsum(0)
    before = (total - mass).double()
    by_top_p = (before < top_p * total[-1]).sum(0, keepdim=True)
    by_min_p = (odds >= min_p).sum(0, keepdim=True)
    return ids, total, torch.minimum(by_top_p, by_min_p).clamp(min=1)


def draw(scores: Tensor, top_k: int, knobs: Tensor, uniform: Tensor) -> Tensor:
    """The token [1] at a uniform number's place [1] in the mass of the kept tokens.

    Of scores that are not numbers it is an arbitrary token, never an index out of range: on a GPU
    that would end the process.
    """
    ids, total, count = kept(scores, top_k, knobs)
    limit = total.index_select(0, count - 1)
    target = torch.minimum((uniform * limit).long(), limit - 1)
    place = torch.minimum((total <= target).sum(0, keepdim=True), count - 1)
    return ids.index_select(0, place)

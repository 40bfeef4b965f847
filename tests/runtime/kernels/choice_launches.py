"""What a GPU launches to choose tokens, for `test_compile`: on tensors without data."""

import itertools
from collections.abc import Iterator

import torch

CHOICE = {"adjust", "best_rows", "likeliest_rows", "rank_groups_rows", "draw_rows", "sum_masses"}
CHOICE |= {"pick", "exp_sums", "log_probabilities"}
V = 248320  # the largest vocabulary: the kernels that rank grow with it


def choices_of_rows(full: bool) -> Iterator[str]:
    """The next tokens of several rows under every shape, and their log-probabilities."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.state.host_rings import new_log_probabilities, new_ring
    from lowbit.runtime.state.sampler import ALL, ChoiceShape, new_sampler_rows

    sampler = new_sampler_rows(5, V, "meta")
    slots, out = new_ring(5, pinned=False), new_log_probabilities(5, pinned=False)
    for M in (1, 4) if full else (4,):
        logits, token = torch.empty((M, V)), torch.empty(M, dtype=torch.int64)
        rows, positions = torch.empty((2, M), dtype=torch.int32)
        for candidates, adjusted in itertools.product((1, 32, 64, ALL), (False, True)):
            sampler.shape = ChoiceShape(candidates, adjusted)
            cuda.choose(logits, sampler, rows, positions, token, slots)
            yield f"{M} rows, {candidates} candidates{', adjusted' * adjusted}"
            if not adjusted:  # of a draft head
                ids = torch.empty(V, dtype=torch.int64)
                cuda.choose(logits, sampler, rows, positions, token, slots, ids=ids)
                yield f"{M} rows, {candidates} candidates of a draft head"
        cuda.log_probabilities(logits, sampler.vocabulary, rows, positions, token, out)
        yield f"{M} rows"

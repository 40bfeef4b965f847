"""Log-probabilities and the likeliest tokens, against the same in PyTorch on the CPU."""

import pytest
import torch

from lowbit.formats.sampling_ranges import MOST_LOGPROBS
from lowbit.runtime.backends import cpu, cuda
from lowbit.runtime.backends.cpu_sampling import best_ids
from lowbit.runtime.kernels.sampling.logprobs import likeliest
from lowbit.runtime.state.host_rings import RING, new_log_probabilities
from tests.runtime.kernels.sampling.logits import VOCABULARY, some_logits


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1030, 7])
def test_log_probabilities(device: str, vocabulary: int) -> None:
    logits = some_logits(4, 3)[0][:, : vocabulary + 50]
    logits[2, 3:6] = -torch.inf
    rows = torch.tensor([2, 1, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 4, 5], dtype=torch.int32, device=device)
    token = torch.tensor([3, 6, 4], device=device)
    ours, theirs = (new_log_probabilities(4, pinned=device == "cuda") for _ in range(2))
    cuda.log_probabilities(logits.to(device), vocabulary, rows, positions, token, ours)
    cpu.log_probabilities(logits, vocabulary, rows.cpu(), positions.cpu(), token.cpu(), theirs)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.allclose(ours.values, theirs.values, rtol=0, atol=1e-5)
    if device == "cuda":  # the same bits alone
        for m in range(3):
            one = new_log_probabilities(4, pinned=True)
            alone = slice(m, m + 1)
            cuda.log_probabilities(
                logits[alone].to(device),
                vocabulary,
                rows[alone],
                positions[alone],
                token[alone],
                one,
            )
            torch.cuda.synchronize()
            at = int(positions[m]) % RING, int(rows[m])
            assert torch.equal(one.values[at], ours.values[at])


def test_likeliest_order(device: str) -> None:
    logits = some_logits(5, 4)[0]
    expected = best_ids(logits[:, :VOCABULARY], MOST_LOGPROBS)
    assert torch.equal(likeliest(logits.to(device), VOCABULARY, MOST_LOGPROBS).cpu(), expected)

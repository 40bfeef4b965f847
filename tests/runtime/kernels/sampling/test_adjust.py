"""Adjusted logits, against the same in PyTorch on the CPU."""

import torch

from lowbit.runtime.backends.cpu_sampling import adjusted
from lowbit.runtime.kernels.sampling.adjust import adjust
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.kernels.sampling.logits import STRICT, VOCABULARY, some_logits
from tests.runtime.rows_of_tokens import Asked, configured


def test_adjust_matches_cpu_bitwise(device: str) -> None:
    logits = some_logits(0, 6)[0]
    logits[1, 77], logits[2, 78], logits[3, 79] = torch.inf, -torch.inf, 3e38
    allowed = tuple(range(0, VOCABULARY, 3))
    many = tuple((id, id / 100 - 10) for id in range(900, 1200))
    asked = [
        Asked(STRICT, (3, 77, 77, VOCABULARY - 1)),
        Asked(SamplingParams()),
        Asked(STRICT, allowed=allowed),
        Asked(SamplingParams(logit_bias=many), allowed=allowed),
        Asked(SamplingParams(repetition_penalty=0.6), (78, 79)),
        Asked(SamplingParams(frequency_penalty=-1.1), allowed=()),
    ]
    samplers = [configured(asked, VOCABULARY, each) for each in ("cpu", device)]
    counts = torch.randint(-3, 3, (7, VOCABULARY), dtype=torch.int32).clamp(min=0)
    for sampler in samplers:
        sampler.counts.copy_(counts)
    rows = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32)
    expected = adjusted(logits, samplers[0], rows)
    got = adjust(logits.to(device), samplers[1], rows.to(device))[:, :VOCABULARY].cpu()
    assert torch.equal(got, expected)

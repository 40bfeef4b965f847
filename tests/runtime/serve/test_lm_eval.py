"""lm-evaluation-harness as a client of /v1/completions and /tokenize."""

import warnings
from dataclasses import replace

import pytest
import torch

from lowbit.runtime.engine.load import load
from lowbit.runtime.evaluate.scoring import score
from tests.runtime.serve.conftest import NAME, Running, running

pytestmark = pytest.mark.clients
TEXTS = ("Once upon a time, there was a little girl named Lily.", " She loved to play outside")


def test_lm_eval_scores_as_evaluate_does(server: Running) -> None:
    """In float32: in bfloat16 the two cut prompts at different places, which rounds differently."""
    pytest.importorskip("lm_eval")
    model = load(server.model.folder, device="cpu", dtype=torch.float32, context=256)
    with running(model) as found:
        check_lm_eval(found)


def check_lm_eval(server: Running) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the harness's own
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        harness = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model=NAME, num_concurrent=1, batch_size=2
        )
        assert harness.tokenizer_backend == "remote"
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], " with her dog"), (TEXTS[0], " xyzzy")]
        asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        found = harness.loglikelihood(asked, disable_tqdm=True)
        until = Instance("generate_until", {}, (TEXTS[0], {"until": ["."], "max_gen_toks": 9}), 0)
        [text] = harness.generate_until([until], disable_tqdm=True)
    model = server.model
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        whole = model.encode(context + continuation, raw=True)
        length = len(model.encode(context, raw=True))
        own = score(model, whole[:length], whole[length:])
        assert value == pytest.approx(own.log_likelihood, abs=1e-4)
        assert is_greedy == own.greedy
    sampling = replace(model.defaults, temperature=0.0)
    alone = model.generate(TEXTS[0], raw=True, sampling=sampling, max_new_tokens=9, stop=(".",))
    assert text == alone.text

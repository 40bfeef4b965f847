"""YaRN in every container: what its engine makes of the keys is what transformers computes."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lowbit.convert.export.export import export
from lowbit.formats.errors import FormatError
from tests.convert.export.packed_folders import int4_body, make_packed

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
ORIGINAL = "original_max_position_embeddings"

Array = np.ndarray[Any, Any]
Config = dict[str, Any]


def of_transformers(config: Config) -> tuple[Array, float]:
    """Frequencies and attention factor of a config.json."""
    whole = CONFIG_MAPPING[config["model_type"]](**copy.deepcopy(config))
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](whole.get_text_config())
    return frequencies.numpy(), factor


def of_engines(
    dim: int, base: float, factor: float, original: int, fast: float, slow: float
) -> tuple[Array, float]:
    """The same by the formulas of ggml and mlx-lm, which round the ends of the ramp."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(pair(fast))), min(dim - 1, math.ceil(pair(slow)))
    plain = base ** (-np.arange(0, dim, 2) / dim)
    ramp = np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 1 + 0.1 * math.log(factor)


def check(found: tuple[Array, float], expected: tuple[Array, float]) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-7)


def read(path: Path) -> Config:
    content: Config = json.loads((path / "config.json").read_text())
    return content


@pytest.fixture
def dense(dense_config: Config) -> Config:
    return dense_config | {"rope_scaling": YARN}


@pytest.fixture
def hybrid(hybrid_config: Config) -> Config:
    hybrid_config["text_config"]["rope_parameters"] |= YARN
    return hybrid_config


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_llama_cpp(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    config: Config = request.getfixturevalue(kind)
    export(make_packed(tmp_path / "packed", config, int4_body), tmp_path / "out", "gguf")
    fields = gguf.GGUFReader(tmp_path / "out" / "out.gguf").fields
    arch = "qwen3" if kind == "dense" else "qwen35"
    dim, base, scaling, factor, original, context = (
        fields[f"{arch}.{key}"].contents()
        for key in (
            *("rope.dimension_count", "rope.freq_base", "rope.scaling.type"),
            *("rope.scaling.factor", "rope.scaling.original_context_length", "context_length"),
        )
    )
    assert (scaling, original, context) == (gguf.RopeScalingType.YARN.value, 4096, 16384)
    check(of_engines(dim, base, factor, original, 32, 1), of_transformers(config))


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_dense_models_of_mlx_lm_read_the_older_key(
    tmp_path: Path, dense_config: Config, form: str
) -> None:
    dense_config |= {form: YARN | {"beta_fast": 8, "rope_theta": dense_config.pop("rope_theta")}}
    export(make_packed(tmp_path / "packed", dense_config, int4_body), tmp_path / "out", "mlx")
    made = read(tmp_path / "out")
    scaling = made["rope_scaling"]
    assert "rope_parameters" not in made
    assert (scaling["type"], scaling["beta_fast"], scaling["beta_slow"]) == ("yarn", 8, 1)
    found = of_engines(
        made["head_dim"], made["rope_theta"], scaling["factor"], scaling[ORIGINAL], 8, 1
    )
    check(found, of_transformers(dense_config))
    check(of_transformers(made), of_transformers(dense_config))


def test_hybrid_models_of_mlx_lm_read_the_newer_key(tmp_path: Path, hybrid: Config) -> None:
    text = hybrid["text_config"]
    text["rope_scaling"] = text.pop("rope_parameters") | {"type": "yarn"}
    export(make_packed(tmp_path / "packed", hybrid, int4_body), tmp_path / "out", "mlx")
    made = read(tmp_path / "out")["text_config"]
    rope = made["rope_parameters"]
    assert "rope_scaling" not in made
    assert (rope["type"], rope["mrope_section"]) == ("yarn", [2, 1, 1])
    dim = int(made["head_dim"] * rope["partial_rotary_factor"])
    found = of_engines(dim, rope["rope_theta"], rope["factor"], rope[ORIGINAL], 32, 1)
    check(found, of_transformers(hybrid))


def test_a_llama_3_scaling_under_the_newer_key_reaches_mlx_lm(
    tmp_path: Path, dense_config: Config
) -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
    rope = {"rope_type": "llama3", "rope_theta": dense_config.pop("rope_theta"), **values}
    config = dense_config | {"model_type": "llama", "rope_parameters": rope}
    export(make_packed(tmp_path / "packed", config, int4_body), tmp_path / "out", "mlx")
    made = read(tmp_path / "out")
    assert made["rope_scaling"] == {"type": "llama3", "rope_type": "llama3", **values}
    assert made["rope_theta"] == rope["rope_theta"]


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_gptq_and_awq_keep_config_json(tmp_path: Path, dense: Config, target: Any) -> None:
    dense["rope_scaling"] = YARN | {"attention_factor": 1.0, "truncate": False}
    export(make_packed(tmp_path / "packed", dense, int4_body), tmp_path / "out", target)
    assert read(tmp_path / "out")["rope_scaling"] == dense["rope_scaling"]


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        ("gguf", {"beta_fast": 16}, "`beta_fast` 16.0: llama.cpp takes it as 32"),
        ("gguf", {"beta_slow": 2}, "`beta_slow` 2.0: llama.cpp takes it as 1"),
        ("gguf", {"truncate": False}, "`truncate` false: llama.cpp takes it as true"),
        ("mlx", {"truncate": False}, "`truncate` false: mlx-lm takes it as true"),
        ("mlx", {"attention_factor": 1.0}, "`attention_factor` 1.0: mlx-lm takes it as 1.138"),
        (
            "gguf",
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            "`attention_factor` 1.0: llama.cpp takes it as 1.138",
        ),
    ],
)
def test_what_an_engine_would_read_as_its_default_is_refused(
    tmp_path: Path, dense: Config, target: Any, changes: Config, words: str
) -> None:
    dense["rope_scaling"] = YARN | changes
    packed = make_packed(tmp_path / "packed", dense, int4_body)
    with pytest.raises(FormatError) as caught:
        export(packed, tmp_path / "out", target)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()

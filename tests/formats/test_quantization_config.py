"""quantization_config, written and read, against compressed-tensors' own parser and matcher."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig as TheirConfig
from compressed_tensors.utils.match import match_named_modules, match_targets
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.quantization_config import (
    KEY,
    QuantizationConfig,
    read_quantization_config,
    unserved,
    write_quantization_config,
)
from lowbit.formats.layout.scheme import Scheme
from tests.lanes import in_commands

INT4, INT8 = Scheme(4, 128), Scheme(8, 128)
KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PREFIXES = ("model", "model.language_model", "language_model.model")
Schemes = Mapping[str, Scheme | None]


def linears(layers: int = 12, prefix: str = "model") -> list[str]:
    return [f"{prefix}.layers.{i}.{kind}" for i in range(layers) for kind in KINDS] + ["lm_head"]


def read(section: Any) -> QuantizationConfig:
    parsed = read_quantization_config({KEY: section})
    assert parsed is not None
    return parsed


def as_model(modules: list[str]) -> torch.nn.Module:
    """A tree with a small Linear at each name."""
    root = torch.nn.Module()
    for name in modules:
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(leaf, torch.nn.Linear(1, 1))
    return root


def their_schemes(section: dict[str, Any], modules: list[str]) -> dict[str, Scheme | None]:
    """The scheme of each module as compressed-tensors assigns it when it loads a model."""
    config = TheirConfig.model_validate(section)
    by_target = {
        target: group for group in config.config_groups.values() for target in group.targets
    }
    found: dict[str, Scheme | None] = dict.fromkeys(modules)
    for name, module in match_named_modules(as_model(modules), by_target, config.ignore):
        if name in found:
            weights = by_target[match_targets(name, module, by_target)[0]].weights
            size = None if weights.strategy == "channel" else weights.group_size
            found[name] = Scheme(weights.num_bits, size, weights.symmetric)
    return found


def uniform() -> dict[str, Scheme | None]:
    return dict.fromkeys(linears(), INT4)


def mixed() -> dict[str, Scheme | None]:
    return {name: INT8 if "self_attn" in name or name == "lm_head" else INT4 for name in linears()}


def overrides() -> dict[str, Scheme | None]:
    return {
        **mixed(),
        "model.layers.1.mlp.gate_proj": INT8,
        "model.layers.11.mlp.gate_proj": INT8,
        "model.layers.10.mlp.down_proj": None,
        "model.layers.0.self_attn.o_proj": Scheme(3, 64),
        "lm_head": None,
    }


def rows_and_zero_points() -> dict[str, Scheme | None]:
    return {**uniform(), "lm_head": Scheme(8, None), "model.layers.2.mlp.up_proj": Scheme(4, 32)}


CASES = [uniform(), mixed(), overrides(), rows_and_zero_points(), {"lm_head": INT8}]


@pytest.mark.parametrize("schemes", CASES, ids=["all", "mixed", "overrides", "row", "head"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_written_config_gives_each_module_its_scheme(schemes: Schemes, prefix: str) -> None:
    section = write_quantization_config(schemes)
    renamed = {
        name.replace("model.layers", f"{prefix}.layers"): scheme for name, scheme in schemes.items()
    }
    parsed = read(section)
    assert {name: parsed.scheme_for(name) for name in renamed} == renamed
    assert their_schemes(section, list(renamed)) == renamed


@pytest.mark.parametrize("schemes", CASES, ids=["all", "mixed", "overrides", "row", "head"])
def test_patterns_match_suffixes_alone(schemes: Schemes) -> None:
    section = write_quantization_config(schemes)
    targets = [*section["ignore"]]
    for group in section["config_groups"].values():
        targets += group["targets"]
    assert all(target.startswith("re:.*") and target.endswith("$") for target in targets)
    parsed = read(section)
    for foreign in (
        "model.layers.0.self_attn",
        "model.embed_tokens",
        "model.layers.0.mlp.up_projx",
    ):
        assert parsed.scheme_for(foreign) is None


def test_content_of_the_section() -> None:
    section = write_quantization_config({**uniform(), "lm_head": Scheme(8, None)})
    assert section["quant_method"] == "compressed-tensors"
    assert section["format"] == "pack-quantized"
    assert section["quantization_status"] == "compressed"
    assert section["ignore"] == []
    assert list(section["config_groups"]) == ["group_0", "group_1"]
    assert section["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        "dynamic": False,
        "actorder": None,
    }
    assert section["config_groups"]["group_1"]["targets"] == ["re:.*lm_head$"]
    assert section["config_groups"]["group_1"]["weights"]["strategy"] == "channel"
    assert "sparsity_config" not in section


def test_example_of_the_specification() -> None:
    text = (Path(__file__).parents[2] / "formats/SPEC.md").read_text()
    section = json.loads("{" + text.split("```json")[1].split("```")[0] + "}")[KEY]
    parsed = read(section)
    assert parsed.scheme_for("lm_head") == INT4
    assert parsed.scheme_for("model.layers.12.mlp.up_proj") == INT4
    assert parsed.scheme_for("model.layers.3.mlp.down_proj") is None
    written = write_quantization_config(
        {"model.layers.0.mlp.up_proj": INT4, "lm_head": INT4}
        | {f"model.layers.{i}.mlp.down_proj": None if i == 3 else INT8 for i in range(4)}
    )
    assert written.keys() == section.keys()
    assert written["config_groups"]["group_0"] == section["config_groups"]["group_0"]
    assert written["ignore"] == section["ignore"]


def test_order_of_modules_changes_nothing_that_is_read() -> None:
    schemes = overrides()
    parsed = read(write_quantization_config(dict(reversed(schemes.items()))))
    assert {name: parsed.scheme_for(name) for name in schemes} == schemes


@given(data=st.data())
def test_any_assignment_survives(data: st.DataObject) -> None:
    choice = st.sampled_from([None, INT4, INT8, Scheme(4, None), Scheme(2, 32)])
    schemes = {name: data.draw(choice) for name in linears(layers=3)}
    section = write_quantization_config(schemes)
    if any(schemes.values()):
        parsed = read(section)
        assert {name: parsed.scheme_for(name) for name in schemes} == schemes
        assert their_schemes(section, list(schemes)) == schemes


def test_modules_that_suffixes_cannot_tell_apart() -> None:
    with pytest.raises(FormatError, match=r"`\S*layers.0.mlp.up_proj`: no suffix pattern"):
        write_quantization_config(
            {"model.layers.0.mlp.up_proj": INT4, "encoder.layers.0.mlp.up_proj": None}
        )


MTP = ["mtp.fc", *(f"mtp.layers.0.{kind}" for kind in KINDS)]
GATES = "re:.*linear_attn[.]in_proj_[ab]$"
WITH_MTP: dict[str, dict[str, Scheme | None]] = {
    "as stored": dict.fromkeys(MTP),
    "quantized": dict.fromkeys(MTP, INT8),
    "layers only": {name: None if name == "mtp.fc" else INT8 for name in MTP},
    "mixed": {name: INT4 if "mlp" in name else INT8 for name in MTP},
    "like the decoder": dict.fromkeys(MTP, INT4),
}


@in_commands(
    "model-mixed-*",
    "model-row-*",
    "model.language_model-all-*",
    "model.language_model-overrides-*",
    "language_model.model-mixed-*",
    "language_model.model-overrides-*",
)
@pytest.mark.parametrize("mtp", WITH_MTP)
@pytest.mark.parametrize("decoder", CASES[:4], ids=["all", "mixed", "overrides", "row"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_mtp_layers_are_told_from_the_decoders(mtp: str, decoder: Schemes, prefix: str) -> None:
    section = write_quantization_config({**decoder, **WITH_MTP[mtp]}, ["re:.*visual.*", GATES])
    others = dict.fromkeys(
        [
            *(f"{prefix}.layers.0.linear_attn.in_proj_{x}" for x in "ab"),
            *("visual.blocks.0.mlp.linear_fc1", "model.visual.merger.linear_fc1"),
        ]
    )
    expected = {
        **{name.replace("model.layers", f"{prefix}.layers"): s for name, s in decoder.items()},
        **WITH_MTP[mtp],
        **others,
    }
    parsed = read(section)
    assert {name: parsed.scheme_for(name) for name in expected} == expected
    assert their_schemes(section, list(expected)) == expected
    inside = {f"drafter.{name}": scheme for name, scheme in WITH_MTP[mtp].items()}
    assert their_schemes(section, list(inside)) == inside


def test_ignore_list_of_a_model_with_vision_and_mtp() -> None:
    section = write_quantization_config(
        {**uniform(), "mtp.fc": None, "mtp.layers.0.mlp.up_proj": None}, ["re:.*visual.*", GATES]
    )
    assert section["ignore"] == ["re:.*visual.*", GATES, "re:^mtp.*"]
    assert section["config_groups"]["group_0"]["targets"][-1] == "re:.*lm_head$"


def group(targets: Any = ("Linear",), **weights: Any) -> dict[str, Any]:
    return {
        "targets": list(targets) if isinstance(targets, tuple) else targets,
        "weights": {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 128,
            "dynamic": False,
            "observer": "minmax",
            "observer_kwargs": {},
            "block_structure": None,
            **weights,
        },
        "input_activations": None,
        "output_activations": None,
    }


def foreign(*groups: Any, **keys: Any) -> dict[str, Any]:
    """A section as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": each for i, each in enumerate(groups or [group()])},
        **keys,
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (foreign(), INT4),
        (foreign(group(actorder="static")), INT4),
        (foreign(group(actorder="weight")), INT4),
        (foreign(group(actorder=False)), INT4),
        (foreign(group(strategy="channel", group_size=None)), Scheme(4, None)),
        (foreign(group(strategy="channel", group_size=-1, num_bits=8)), Scheme(8, None)),
        (foreign(group(symmetric=False)), Scheme(4, 128, symmetric=False)),
        (foreign({**group(), "format": "pack-quantized"}, format="mixed-precision"), INT4),
        (foreign(sparsity_config={}), INT4),
        (foreign(sparsity_config={"format": "dense"}), INT4),
        (foreign(kv_cache_scheme={"num_bits": 8, "type": "float"}), INT4),
        (foreign(transform_config={}, version="0.12.2"), INT4),
    ],
)
def test_foreign_sections(section: dict[str, Any], expected: Scheme) -> None:
    modules = linears(layers=2)
    parsed = read(section)
    assert {name: parsed.scheme_for(name) for name in modules} == {
        name: None if name == "lm_head" else expected for name in modules
    }
    assert their_schemes(section, modules) == {name: parsed.scheme_for(name) for name in modules}


def test_group_of_minus_one_is_a_whole_row() -> None:
    assert read(foreign(group(group_size=-1))).scheme_for("x") == Scheme(4, None)


def test_old_key_and_no_section() -> None:
    parsed = read_quantization_config({"compression_config": foreign()})
    assert parsed is not None
    assert parsed.scheme_for("x") == INT4
    assert read_quantization_config({"model_type": "qwen3"}) is None


OVERLAPS = [
    foreign(group(), group(("re:.*mlp.*",), num_bits=8)),
    foreign(group(("re:.*mlp.*",), num_bits=8), group()),
    foreign(group(("re:.*up_proj",)), group(("re:.*mlp.*",), num_bits=8)),
    foreign(group(("re:.*mlp.*",)), group(("re:.*up_proj",), num_bits=8)),
    foreign(group(("re:.*mlp.*",)), group(("re:.*mlp.*",), num_bits=8)),
    foreign(group(("Linear",)), group(("Linear",), num_bits=8)),
    foreign(group(("re:.*",)), group(("model.layers.1.mlp.up_proj",), num_bits=8)),
    foreign(group(("re:model[.]layers[.]1[.]",), num_bits=8), group(("re:up_proj",))),
    foreign(ignore=["re:.*self_attn.*", "model.layers.0.mlp.up_proj", "lm_head"]),
    foreign(ignore=["Linear"]),
    foreign(ignore=[]),
    foreign(ignore=None),
    foreign(group(("Embedding", "lm_head"))),
]


@pytest.mark.parametrize("section", OVERLAPS)
def test_overlapping_targets_resolve_as_in_compressed_tensors(section: dict[str, Any]) -> None:
    modules = linears(layers=2)
    parsed = read(section)
    assert {name: parsed.scheme_for(name) for name in modules} == their_schemes(section, modules)


def test_exact_name_wins_over_any_pattern() -> None:
    section = foreign(group(("transformer.layers.1.mlp.up_proj",), num_bits=8), group(("re:.*",)))
    modules = linears(layers=2, prefix="transformer")
    parsed = read(section)
    assert parsed.scheme_for("transformer.layers.1.mlp.up_proj") == INT8
    assert parsed.scheme_for("transformer.layers.0.mlp.up_proj") == INT4
    assert {name: parsed.scheme_for(name) for name in modules} == their_schemes(section, modules)


ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ([], "`quantization_config` is not an object"),
        ({"quant_method": "bitsandbytes"}, "quantization method `bitsandbytes` is not supported"),
        ({"quant_method": "fp8"}, "quantization method `fp8`"),
        ({}, "quantization method `None`"),
        (foreign(sparsity_config={"format": "sparse-24"}), "`sparsity_config`"),
        (foreign(sparsity_config={"targets": []}), "`sparsity_config`"),
        (foreign(sparsity_config=["dense"]), "`sparsity_config`"),
        (foreign(config_groups={}), "`config_groups` is missing or empty"),
        (foreign(config_groups=None), "`config_groups` is missing or empty"),
        (foreign(config_groups=[group()]), "`config_groups` is missing or empty"),
        (foreign(["Linear"]), "group `group_0` has no `weights`"),
        (foreign({"targets": ["Linear"], "weights": None}), "group `group_0` has no `weights`"),
        (foreign(format="float-quantized"), "format `float-quantized`, expected `pack-quantized`"),
        (foreign(format=None), "format `None`"),
        (foreign(format="mixed-precision"), "format `mixed-precision`"),
        (foreign({**group(), "format": "marlin-24"}), "format `marlin-24`"),
        (foreign({**group(), "input_activations": ACTIVATIONS}), "`input_activations` is set"),
        (foreign({**group(), "output_activations": ACTIVATIONS}), "`output_activations` is set"),
        (foreign(group(type="float")), "type `float`, expected `int`"),
        (foreign(group(dynamic=True)), "dynamic weight quantization"),
        (foreign(group(actorder="group")), "actorder `group` needs g_idx"),
        (foreign(group(actorder="dynamic")), "actorder `dynamic` needs g_idx"),
        (foreign(group(actorder=True)), "actorder `True` needs g_idx"),
        (foreign(group(actorder=["x"])), "actorder"),
        (foreign(group(strategy="tensor", group_size=None)), "strategy `tensor`"),
        (foreign(group(strategy="block", group_size=None)), "strategy `block`"),
        (foreign(group(strategy=None)), "strategy `None` with group_size 128"),
        (foreign(group(group_size=None)), "strategy `group` with group_size None"),
        (foreign(group(group_size=True)), "group_size True"),
        (foreign(group(group_size="128")), "group_size 128 is not supported"),
        (foreign(group(group_size=0)), "group size must be positive, got 0"),
        (foreign(group(num_bits=None)), "num_bits is None"),
        (foreign(group(num_bits="4")), "num_bits is '4'"),
        (foreign(group(num_bits=True)), "num_bits is True"),
        (foreign(group(num_bits=16)), "2 to 8, got 16"),
        (foreign(group(num_bits=1)), "2 to 8, got 1"),
        (foreign(group(symmetric="false")), "symmetric is 'false'"),
        (foreign(group("Linear")), "`group_0.targets` is not a list of strings"),
        (foreign(group((1,))), "`group_0.targets` is not a list of strings"),
        (foreign(ignore="lm_head"), "`ignore` is not a list of strings"),
        (foreign(ignore=["re:("]), "`ignore`: bad pattern `re:(`"),
        (foreign(group(("re:*",))), "`group_0.targets`: bad pattern `re:*`"),
        (foreign(group(("re:a{99999999999}",))), "bad pattern `re:a{99999999999}`"),
        (foreign(ignore=["re:" + "(" * 20_000]), "bad pattern"),
    ],
)
def test_refused_by_name(section: Any, words: str) -> None:
    with pytest.raises(FormatError) as error:
        read_quantization_config({KEY: section})
    assert words in str(error.value)
    assert "config.json" in str(error.value) or "must be" in str(error.value)


def test_served_schemes() -> None:
    assert unserved(INT4, (4, 8)) is None
    assert unserved(Scheme(3), (4, 8)) == "3-bit weights (served: 4, 8)"
    assert unserved(Scheme(4, symmetric=False), (4, 8)) is None
    assert "asymmetric 8-bit" in str(unserved(Scheme(8, symmetric=False), (4, 8)))

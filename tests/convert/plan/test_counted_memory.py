"""Memory that is counted before the work, against figures that are counted by hand."""

from pathlib import Path

import pytest

from lowbit.convert.plan import memory
from lowbit.convert.plan.calibration_cost import Windows, shapes_of
from lowbit.convert.plan.calibration_memory import (
    NORMAL_BYTES,
    NORMAL_ELEMENTS,
    SOLVE_BYTES,
    calibration_memory,
    check_calibration,
    products_at_a_time,
)
from lowbit.convert.plan.memory import (
    Memory,
    check_free,
    check_windows,
    logits_peak_bytes,
    training_memory,
)
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import ResourceError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.convert.fixture_types import Config

GB = 1_000_000_000
MIXTURE = Path(__file__).parents[3] / "examples/models/tiny-qwen3-moe"


QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def test_it_grows_with_the_text_and_is_dominated_by_it(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    short, long = (logits_peak_bytes(config, (windows, 512)) for windows in (2, 2000))
    grown = 1998 * 512
    assert 2 * 256 * 4 * grown <= long - short <= 6 * 256 * 4 * grown


def test_long_windows_count_where_they_need_more(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    many = logits_peak_bytes(config, (2000, 512))
    assert logits_peak_bytes(config, (2000, 512), (2, 8192)) == many
    few = logits_peak_bytes(config, (8, 512), threads=2)
    assert logits_peak_bytes(config, (8, 512), (2, 8192), threads=2) > few


def test_the_largest_kind_of_layer_counts(hybrid: Path) -> None:
    config = dict(open_checkpoint(hybrid).config)
    text = dict(config["text_config"])
    grown = {**config, "text_config": {**text, "linear_num_value_heads": 64}}
    assert logits_peak_bytes(grown, (1, 10)) > logits_peak_bytes(config, (1, 10))
    wide = {**config, "text_config": {**text, "num_attention_heads": 256}}
    assert logits_peak_bytes(wide, (1, 10)) > logits_peak_bytes(config, (1, 10))


def test_experts_see_the_tokens_that_are_routed_to_them() -> None:
    config = dict(open_checkpoint(MIXTURE).config)
    fewer, more = (logits_peak_bytes(config, (80, 512), watched=n) for n in (40, 80))
    common = 2 * 256 + 2 * 256 + 2 * (256 + 128) + (256 + 6)  # q, o, k and v, router
    expert = 3 * (256 + 128)
    assert more - fewer == pytest.approx(4 * 40 * 512 * (common + 2 * expert) * 5 / 4, rel=1e-3)


def test_memory_of_a_real_model(small_config: Config) -> None:
    config = {**small_config, **QWEN3_8B}
    found = shapes_of(config, Recipe().schemes(tensor_table(config)))
    windows = Windows(256, 512)
    gpu = calibration_memory(found, Method("gptq"), windows, "cuda", 16)
    # States of both models, and the head's codes twice; the largest layer of 192 M on the GPU.
    states = gpu.ram - memory.BASE_BYTES - 2 * 151936 * 4096
    assert states == 256 * gpu.window == 2 * 4 * 131072 * 4096 * 5 // 4
    assert 10 * GB < gpu.gpu < 30 * GB
    less = calibration_memory(found, Method("weighted"), windows, "cuda", 16)
    assert less.gpu < gpu.gpu
    assert less.window == gpu.window // 2  # the original's states alone
    cpu = calibration_memory(found, Method("gptq"), windows, "cpu", 2)
    assert cpu.gpu == 0
    assert 20 * GB < cpu.ram < 30 * GB


def test_the_head_of_a_small_model_counts(small_config: Config) -> None:
    narrow = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8}
    config = {**small_config, **QWEN3_8B, **narrow}
    schemes, windows = Recipe().schemes(tensor_table(config)), Windows(16, 512)
    whole = shapes_of(config, schemes)
    stored = shapes_of(config, {**schemes, "lm_head": None})
    head = 151936 * 1024
    for method in (Method("gptq"), Method("weighted")):
        rams = [calibration_memory(each, method, windows, "cpu", 1).ram for each in (whole, stored)]
        assert rams[0] - memory.BASE_BYTES - 16 * 2**21 * 5 // 4 > 2 * head * 5 / 4
        assert rams[0] > rams[1]
    on_gpu, without = (
        calibration_memory(each, Method("gptq"), windows, "cuda", 1) for each in (whole, stored)
    )
    assert on_gpu.ram - without.ram == 2 * head
    solved = 36 * 32768 * 1024 + 12 * 32768 * 16**2 + 12 * 4 * 1024**2  # codes, equations, moments
    parts = 6 * (1024**2 + 32768 * 1024)
    assert on_gpu.gpu - 16 * on_gpu.window == (solved + parts) * 5 // 4


def test_moments_wait_for_their_sum_two_a_thread() -> None:
    assert products_at_a_time(1024, 2, 3) == 6
    assert products_at_a_time(12288, 2, 16) == 3  # of 1.2 GB each
    assert products_at_a_time(65536, 2, 1) == 1


def test_moments_of_batches_are_gone_before_they_are_factorized(small_config: Config) -> None:
    """One layer in the shapes of Qwen3-0.6B, whose down projection takes most."""
    config = {**small_config, **QWEN3_8B, "hidden_size": 1024, "intermediate_size": 3072}
    config |= {"num_attention_heads": 16, "num_hidden_layers": 1}
    found = shapes_of(config, Recipe().schemes(tensor_table(config)))
    weights = 1024 * (4096 + 2048 + 3 * 3072)
    states, normals = 2 * 4 * 1024 * 5 // 4, NORMAL_BYTES * 1024 * (3072 // 64) ** 2
    # A thread has 2 products of each of 2 moments beside 4 sums; factorizing takes 10 matrices.
    for threads, squares in ((1, 10), (2, 4 + 8)):
        windows = Windows(16 * threads, 512)
        ram = calibration_memory(found, Method("gptq"), windows, "cpu", threads).ram
        passing = threads * 2048 * (4 * 3072 + 8 * 1024) * 4
        solved = squares * 4 * 3072**2 + SOLVE_BYTES * 1024 * 3072 + normals
        work = (passing + 14 * weights) * 5 // 4 + solved
        assert ram == memory.BASE_BYTES + windows.tokens * states + work
    two = shapes_of(config | {"num_hidden_layers": 2}, Recipe().schemes(tensor_table(config)))
    more = calibration_memory(two, Method("gptq"), windows, "cpu", threads).ram
    assert more - ram == 4 * weights * 5 // 4  # the next layer is read meanwhile


def test_linears_that_are_solved_together_count_together(small_config: Config) -> None:
    config = {**small_config, **QWEN3_8B}
    schemes = Recipe().schemes(tensor_table(config))
    found = shapes_of(config, schemes)
    assert found.together == {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)}

    def ram(stored: tuple[str, ...]) -> int:
        left = {m: None if m.endswith(stored) else s for m, s in schemes.items()}
        shapes = shapes_of(config, left)
        return calibration_memory(shapes, Method("gptq"), Windows(256, 512), "cpu", 2).ram

    gate = 12288 * 4096
    normals = NORMAL_ELEMENTS - 12288 * 64**2  # both have more than are held at a time
    work = SOLVE_BYTES * gate + NORMAL_BYTES * normals
    assert ram(("down_proj",)) - ram(("down_proj", "gate_proj")) == pytest.approx(work)
    assert ram(()) == ram(("gate_proj",))  # moments of 12,288 columns take more than both


def test_experts_are_chosen_one_a_thread_by_their_own_tokens() -> None:
    config = open_checkpoint(MIXTURE).config
    found = shapes_of(config, Recipe().schemes(tensor_table(config)))
    assert found.together == {(512, 256), (256, 256)}
    assert found.of_expert == {(256, 256), (256, 128)}  # of one, not of all six
    for device, threads in (("cpu", 2), ("cuda", 16)):
        few, more = (
            calibration_memory(found, Method("gptq"), Windows(count, 512), device, threads)
            for count in (400, 800)
        )
        grown = more.ram - few.ram if device == "cpu" else more.gpu - few.gpu
        # A token sees two of six experts; inputs of both models, as they are, scaled and squared.
        workers, slack = (2, 1.0) if device == "cpu" else (1, 5 / 4)
        tokens = 400 * 512 * 2 // 6 * (workers + 1)
        expected = slack * 4 * 5 * 256 * tokens
        assert grown - 400 * few.window == pytest.approx(expected, rel=1e-4)


def test_a_calibration_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 3 * GB, "cuda": 10 * GB}
    for module in ("memory", "calibration_memory"):
        monkeypatch.setattr(f"lowbit.convert.plan.{module}.free_bytes", free.__getitem__)
    windows = Windows(256, 512)
    check_calibration(Memory(3 * GB, 0, 10_000_000), windows, "cpu")
    with pytest.raises(ResourceError) as caught:
        check_calibration(Memory(4 * GB, 0, 10_000_000), windows, "cpu")
    assert str(caught.value) == "calibration takes up to 4.0 GB of memory, free on cpu: 3.0 GB"
    assert caught.value.hint == "give --calib-samples 156 or fewer, or a shorter --calib-length"
    with pytest.raises(ResourceError) as caught:
        check_calibration(Memory(9 * GB, 0, 10_000_000), windows, "cpu")
    assert caught.value.hint == "--method rtn takes a fixed amount of memory"
    with pytest.raises(ResourceError, match=r"up to 11\.0 GB of memory, free on cuda: 10\.0 GB"):
        check_calibration(Memory(2 * GB, 11 * GB, 1), windows, "cuda")
    # States beyond a third of the GPU's free memory stay in RAM.
    check_calibration(Memory(3 * GB, 13 * GB, 4 * GB // 256), windows, "cuda")


def test_training_of_a_wide_head_takes_more_than_17_gb(hybrid: Path) -> None:
    wide = dict(open_checkpoint(hybrid).config)
    wide["text_config"] = {**wide["text_config"], "hidden_size": 4096, "intermediate_size": 12_288}
    wide["text_config"]["vocab_size"] = 248_320
    on_gpu = training_memory(wide, (1024, 512), 32_768, 3, 64, "cuda")
    assert on_gpu.gpu > 17 * GB
    assert on_gpu.window == 7 * 2 * 512 * 4096
    fewer = training_memory(wide, (512, 512), 32_768, 3, 64, "cuda")
    assert on_gpu.gpu - fewer.gpu >= 512 * on_gpu.window
    assert training_memory(wide, (64, 512), 32_768, 3, 64, "cpu").gpu == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free: dict[str, int | None] = {"cpu": 3 * GB, "cuda": 10 * GB}
    monkeypatch.setattr(memory, "free_bytes", free.__getitem__)
    less = "give --windows {} or fewer"
    check_windows("training", Memory(3 * GB, 10 * GB, GB), 8, "cuda", less)
    check_windows("training", Memory(3 * GB, 99 * GB, GB), 8, "cpu", less)
    with pytest.raises(ResourceError, match=r"^training takes up to 5\.5 GB.*cpu: 3\.0 GB$") as e:
        check_windows("training", Memory(5 * GB + GB // 2, 0, GB), 8, "cpu", less)
    assert e.value.hint == "give --windows 5 or fewer"
    with pytest.raises(ResourceError, match=r"up to 19\.0 GB.*cuda: 10\.0 GB$") as e:
        check_windows("training", Memory(GB, 19 * GB, GB), 8, "cuda", less)
    assert e.value.hint == "--device cpu takes the machine's memory"
    free["cpu"] = None
    check_windows("training", Memory(10**15, 0, GB), 8, "cpu", less)
    free["cpu"] = 2 * GB
    check_free("comparing logits", 2 * GB, "cpu", "")
    with pytest.raises(ResourceError, match=r"up to 2\.1 GB of memory, free on cpu: 2\.0 GB"):
        check_free("comparing logits", 2_100_000_000, "cpu", "")

"""Streaming text against the tokenizers library decoding everything at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from lowbit.formats.errors import CheckpointError, RequestError, UnsupportedModelError
from lowbit.runtime.text.tokenizer import TextStream, Tokenizer, load_tokenizer

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
ids_of_any_kind = st.lists(st.integers(0, 4099), max_size=60)


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return load_tokenizer(BUNDLED)


@pytest.fixture
def bytewise(byte_tokenizer: HubTokenizer, tmp_path: Path) -> Tokenizer:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def bytewise_once(
    byte_tokenizer: HubTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytewise")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(id) for id in ids), stream.finish()]


@given(ids=ids_of_any_kind)
def test_pieces_join_to_what_the_library_decodes(bundled: Tokenizer, ids: list[int]) -> None:
    expected = bundled.text.hub.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(bundled, ids)) == expected
    assert bundled.decode(ids) == expected


@given(data=st.binary(max_size=40))
def test_any_bytes_stream_as_the_library_decodes_them(
    bytewise_once: Tokenizer, data: bytes
) -> None:
    tokenizer = bytewise_once
    by_byte = {tokenizer.token_bytes(id)[0]: id for id in range(256)}
    ids = [by_byte[byte] for byte in data]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.text.hub.decode(ids)


@given(text=st.text(max_size=40))
def test_no_piece_of_real_text_holds_a_broken_character(bundled: Tokenizer, text: str) -> None:
    ids = bundled.encode(text)
    pieces = streamed(bundled, ids)
    decoded = bundled.text.hub.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == decoded
    assert sum(piece.count("\ufffd") for piece in pieces) == decoded.count("\ufffd")


def test_a_character_of_several_tokens_comes_whole(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("a😀b")
    assert streamed(bytewise, ids) == ["a", "", "", "", "😀", "b", ""]
    assert streamed(bytewise, ids[:3]) == ["a", "", "", "\ufffd"]  # cut inside the character


def test_special_tokens_are_left_out_and_plain_added_ones_kept(bytewise: Tokenizer) -> None:
    text = "<think>x</think>y<|im_end|>"
    ids = bytewise.encode(text)
    assert len(ids) == 5
    assert bytewise.decode(ids) == "<think>x</think>y"
    assert bytewise.decode([5000]) == ""
    assert bytewise.vocabulary == 261
    assert bytewise.stop_ids() == (bytewise.token_id("<|im_end|>"), 256)


def test_a_frame_is_added_where_it_is_asked_for(
    byte_tokenizer: HubTokenizer, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    path = str(tmp_path / "tokenizer.json")
    byte_tokenizer.save(path)
    hub = HubTokenizer.from_file(path)
    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    hub.add_special_tokens([begin, end])
    first = hub.token_to_id(begin)
    hub.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, first)])
    hub.save(path)
    llama = load_tokenizer(tmp_path)
    assert llama.encode("a", framed=True) == [first, *llama.encode("a")]
    assert llama.token_id(end) in llama.stop_ids()


def test_half_a_surrogate_pair_is_refused(bundled: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the text is not valid Unicode"):
        bundled.encode("caf\udce9")  # an argument in Latin-1, as Python hands it over


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer: it has no vocabulary"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    from tokenizers import decoders, models

    hub = HubTokenizer(models.BPE({"a": 0}, []))
    hub.decoder = decoders.Metaspace()
    hub.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="only byte-level"):
        load_tokenizer(tmp_path)

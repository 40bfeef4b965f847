"""A tiny Qwen3.5 with a vision tower, a tokenizer of bytes and Qwen3.5's own chat template."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.seeing_models import TOKENS, make_seeing

TEMPLATE = Path(__file__).parent / "data" / "chat_templates" / "qwen3.5.jinja"
PAD = TOKENS["image_token_id"]
START, STOP = TOKENS["vision_start_token_id"], TOKENS["vision_end_token_id"]
NAMES = {PAD: "<|image_pad|>", 311: "<|video_pad|>", START: "<|vision_start|>"}
NAMES |= {STOP: "<|vision_end|>", 308: "<|im_start|>", 309: "<|im_end|>"}


def make_seeing_chat(folder: Path) -> Path:
    """Write the model."""
    make_seeing(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [f"<|unused{id}|>" for id in range(256, 308)]
    names = [NAMES[id] for id in range(308, 314)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in words + names])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    return folder

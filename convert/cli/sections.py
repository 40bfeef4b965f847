"""Sections of the help of the commands that plan a conversion."""

# Names of parameters; those that a command lacks are passed over.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Quality, time and size": (
        *("effort", "target_size", "target_bpw", "target_bits", "sensitivities", "method"),
        "positive_scales",
    ),
    "Bits": ("base", "overrides", "group_size", "head", "frequent_rows", "embedding"),
    "Calibration": ("calib", "calib_samples", "calib_length", "calib_chat"),
    "Drafts": ("mtp", "draft_vocabulary", "draft_text"),
    "What is left out": ("drop_vision", "keep_vocabulary", "vocabulary_text", "languages"),
    "Judging": ("report", "activations", "eval_texts", "gate"),
    "Publishing": ("repo", "private", "base_model", "license"),
    "Files and machine": ("revision", "max_shard_bytes", "overwrite", "device", "max_ram"),
}

"""The packed checkpoint: layout, names, manifest. SPEC.md in this folder describes it."""

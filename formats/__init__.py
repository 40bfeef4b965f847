"""What a packed checkpoint is: layout, names, manifest. SPEC.md beside this file is the prose."""

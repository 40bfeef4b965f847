"""Device functions over inline PTX: memory, copies, tensor cores."""

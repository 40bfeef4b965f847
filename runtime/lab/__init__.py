"""What a user asks of a machine: measure, tune and compile a model, check what is missing."""

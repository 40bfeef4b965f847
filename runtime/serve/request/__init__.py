"""The steps that turn a request's body into work for the engine."""

"""The link between the server and the engine, which has a process of its own."""

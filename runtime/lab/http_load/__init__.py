"""A load of requests on any server of OpenAI's API, and the times of its answers."""

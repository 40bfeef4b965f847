"""A request that was not answered."""

from lowbit.formats.errors import ResourceError


class UnansweredError(ResourceError):
    """A request that was not answered; a load counts it by its kind.

    Attributes:
        kind: a few words that failures of one sort share, such as `status 429`.
        status: of HTTP; 0 where none came.
        retry_after_s: seconds that the server asks the client to wait.
    """

    def __init__(
        self, kind: str, detail: str = "", status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        """Keep the kind, and what the server or the system said beyond it."""
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.status, self.retry_after_s = kind, status, retry_after_s

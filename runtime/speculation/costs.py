"""Costs of steps with drafts: a guess, which measured steps correct where they are to."""

from dataclasses import dataclass

from lowbit.runtime.speculation.pace import Cost

# What a token after the first adds to a step, and what a draft of the model's head takes, in steps
# of one token. On a GPU, and where somebody asks for drafts whatever they cost:
CHECK, HEAD = 0.1, 0.07
CHECK_CPU, HEAD_CPU = 0.4, 0.4
FASTER, SLOWER = 0.1, 0.05  # weight of a measurement below and above what was thought
LEAST, MOST = 0.01, 1.0  # what a token or a draft can cost
OUTLIER = 2.0  # times what was thought: a step counts for no more


@dataclass(slots=True)
class Costs:
    """Costs in steps of one token.

    A measurement that is faster counts for more than one that is slower: something else may have
    held that one up, such as the recording of a graph.

    Attributes:
        check: of every token of a step after the first.
        head: of every draft that the model's head makes.
        measured: learn from the steps; else the first guess stays.
        step_s: seconds of a step of one token; None before the first.
    """

    check: float
    head: float
    measured: bool = False
    step_s: float | None = None

    def checking(self, sequences: int) -> Cost:
        """Cost of checking so many drafts of each of several sequences in a step."""
        return self._linear(sequences, 0.0)

    def drafting(self, sequences: int) -> Cost:
        """The same, where the model's head makes the drafts first."""
        return self._linear(sequences, self.head)

    def note_step(self, tokens: int, seconds: float) -> None:
        """Take down how long a step without drafts took, of a token of each sequence."""
        if self.measured:
            one = seconds / (1 + self.check * (tokens - 1))
            known = one if self.step_s is None else self.step_s
            self.step_s = _nearer(known, min(one, OUTLIER * known))

    def note_round(self, tokens: int, seconds: float) -> None:
        """Take down how long a step with drafts took, of so many tokens in all."""
        if self.measured and self.step_s is not None and tokens > 1:
            found = (seconds / self.step_s - 1) / (tokens - 1)
            self.check = _nearer(self.check, min(max(found, LEAST), MOST))

    def note_head(self, drafts: int, sequences: int, seconds: float) -> None:
        """Take down how long a step took in which the head made drafts of each sequence first."""
        if self.measured and self.step_s is not None:
            checked = 1 + self.check * (sequences * (1 + drafts) - 1)
            found = (seconds / self.step_s - checked) / drafts
            self.head = _nearer(self.head, min(max(found, LEAST), MOST))

    def _linear(self, sequences: int, each: float) -> Cost:
        plain = 1 + self.check * (sequences - 1)
        slope = (self.check * sequences + each) / plain
        return lambda drafts: 1 + slope * drafts


def new_costs(device: str, measured: bool) -> Costs:
    """The guess for `cpu` or `cuda`, to be corrected by what is measured or not."""
    if measured and device == "cpu":
        return Costs(CHECK_CPU, HEAD_CPU, measured)
    return Costs(CHECK, HEAD, measured)


def _nearer(value: float, found: float) -> float:
    return value + (FASTER if found < value else SLOWER) * (found - value)

"""One line, once, on drafts of the head or of a drafter that are right as rarely as by chance."""

from dataclasses import dataclass, field

from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.stats import Source, Speculated, Tally


@dataclass(slots=True)
class ChanceWatch:
    """Counts the drafts of answers, until there is something to say."""

    options: LoadOptions  # of the model; they name the drafter
    drafts: Tally = field(default_factory=Tally)  # of all answers so far
    told: bool = False  # the line has been given out

    def count(self, found: Speculated | None) -> str | None:
        """Count an answer's drafts, None without speculation; the line to say now, if any."""
        if found is None or self.told:
            return None
        self.drafts.add(found)
        doubted = self.drafts.speculated.like_chance
        if not doubted:
            return None
        self.told = True
        return self._line(doubted[0])

    def _line(self, source: Source) -> str:
        own = self.drafts.sources[source]
        name = f"the drafter `{self.options.drafter}`"
        if source == "head":
            name = "the model's head for multi-token prediction"
        return (
            f"{name} is right as rarely as by chance, {own.accepted:,} of {own.compared:,} drafts: "
            "it may be for another model, or trained without thinking; --speculate off or ngram "
            "does without it"
        )

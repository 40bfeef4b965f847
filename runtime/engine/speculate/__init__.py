"""Steps that check drafts of the next tokens: who makes the drafts, and how they are checked."""

"""Quality figures rendered for people: terminal, JSON, HTML, model card."""

"""Plans and timelines, predicted and measured, as tables, JSON, pictures and traces for people. It decides nothing."""

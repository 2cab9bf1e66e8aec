"""The same models at the same budgets, trained in every way there is to need less memory: peaks and step times."""

"""Networks that no constant was tuned on, at every accepted budget: whether it is kept, used and predicted."""

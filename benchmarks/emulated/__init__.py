"""Are predictions for a GPU right? Training on an emulated one with the rates of a real one, slowed down."""

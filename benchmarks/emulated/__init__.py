"""Accuracy of predictions for a GPU: training on an emulated one with the rates of a real one, slowed down."""

"""Prediction of data-parallel training: one rank's plan and a network → a step of all ranks, with a lower bound."""

"""Moves the bytes: swap operators, the C++ engine behind them, and the record of what they did."""

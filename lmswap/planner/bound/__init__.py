"""Lower bounds on the seconds of any plan of a step, the prices that prove them, and their independent verification."""

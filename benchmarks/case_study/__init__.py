"""IBM's case study of 2018 again: its tables beside ours. `python -m benchmarks.case_study`."""

"""Programs that measure lmswap on real training; each folder is one workload with its own data and reports."""
